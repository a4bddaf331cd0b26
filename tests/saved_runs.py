"""Runs of four steps, saved at each, and what they leave."""

from tiny import write_recipe

from cpt.data.rows.build import build_data
from cpt.models.build import build_model
from cpt.recipe.load import load_recipe
from cpt.runs.events import read_events
from cpt.stages.build import build_trainer
from cpt.tokenizer.load import load_tokenizer

STEPS = 4


def trainer_of(sections, folder, **checkpoints):
    """A run of four steps, saved at each."""
    folder.mkdir(exist_ok=True)
    sections = {
        **sections,
        "output_dir": str(folder / "runs"),
        "budget": {"tokens": STEPS * 256, "global_batch_tokens": 256},
    }
    recipe = load_recipe(
        write_recipe({**sections, "checkpoints": {"every_steps": 1, **checkpoints}}, folder / "r.yaml")
    )
    tokenizer = load_tokenizer(recipe.tokenizer, recipe.model)
    data = build_data(recipe.data, tokenizer, seed=recipe.seed, evaluation=recipe.evaluation)
    return build_trainer(recipe, build_model(recipe.model, tokenizer, seed=recipe.seed), tokenizer, data)


def published(trainer):
    return sorted(path.name for path in trainer.run_folder.iterdir() if path.is_dir() and path.name != "stacks")


def events(trainer):
    return [(event["kind"], event["step"]) for event in read_events(trainer.run_folder)]
