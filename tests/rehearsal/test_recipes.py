from pathlib import Path

from tiny import write_recipe

from cpt.recipe.difference import differing_keys
from cpt.recipe.load import dump_recipe, load_recipe
from cpt.rehearsal.recipes import rehearsed


def load(sections, folder):
    return load_recipe(write_recipe(sections, folder / "recipe.yaml"))


def test_nothing_that_decides_memory_or_rows_is_changed(tiny_recipe, corpus, tmp_path):
    tiny_recipe |= {
        "checkpoints": {
            "every_steps": 2,
            "keep": 2,
            "archive": "s3://bucket/runs",
            "weights_every_steps": 7,
            "in_background": True,
        },
        "evaluation": {
            "perplexity": [{"path": str(corpus / "held_out.jsonl")}],
            "every_steps": 2,
            "prompts": ["a", "b"],
        },
        "training": {**tiny_recipe["training"], "push_to_hub": True},
    }
    recipe = load(tiny_recipe, tmp_path)
    changed = {
        line.partition(":")[0] for line in differing_keys(recipe, rehearsed(recipe, tmp_path, "x"), ignoring=())
    }
    assert changed == {
        *("name", "output_dir", "evaluation.every_steps", "evaluation.prompts[1]", "training.push_to_hub"),
        *(f"checkpoints.{key}" for key in ("every_steps", "keep", "archive", "weights_every_steps")),
    }


def test_the_recipe_as_it_is_rehearsed_is_one_that_loads(tiny_recipe, tmp_path):
    derived = rehearsed(load(tiny_recipe, tmp_path), Path("runs/.x"), "first-steps", on_oom="split_batch")
    (tmp_path / "derived.yaml").write_text(dump_recipe(derived))
    assert load_recipe(tmp_path / "derived.yaml") == derived


def test_tasks_are_asked_a_few_questions_and_refused_ones_stay_refused(tiny_recipe, tmp_path):
    tasks = [
        {"name": "hellaswag"},
        {"name": "piqa", "limit": 500, "num_fewshot": 3},
        {"name": "domain_test", "questions": 0},
    ]
    derived = rehearsed(load({**tiny_recipe, "evaluation": {"tasks": tasks}}, tmp_path), tmp_path, "x")
    assert [task.options for task in derived.evaluation.tasks] == [
        {"limit": 2},
        {"limit": 2, "num_fewshot": 3},
        {"questions": 0},
    ]
