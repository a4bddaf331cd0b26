"""The control: what a careful user writes with the plain Trainer, over the same model and rows: `python -m
benchmarks.faults.plain RECIPE`.

It goes on from `get_last_checkpoint`, as every example of Hugging Face does. Faults are injected into it as into ours.
"""

import sys
from pathlib import Path

from torch.utils.data import Dataset
from transformers import TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from benchmarks.faults.injection import InjectedFaults
from cpt.data.rows.build import build_data
from cpt.data.rows.packing import Row
from cpt.distributed import join_processes, leave_processes, start_deepspeed
from cpt.models.build import build_model
from cpt.recipe.load import load_recipe
from cpt.recipe.schema import Recipe
from cpt.tokenizer.load import load_tokenizer
from cpt.training.arguments import run_length


class FirstRows(Dataset[Row]):
    """The rows of a run, as a list that ends."""

    def __init__(self, rows: Dataset[Row], count: int) -> None:
        self.rows, self.count = rows, count

    def __getitem__(self, number: int) -> Row:
        return self.rows[number]

    def __len__(self) -> int:
        return self.count


def main() -> None:
    """Train to the end, from the last checkpoint where there is one."""
    recipe = load_recipe(sys.argv[1])
    folder = recipe.output_dir / recipe.name
    start_deepspeed(join_processes(recipe.training))
    tokenizer = load_tokenizer(recipe.tokenizer, recipe.model)
    data = build_data(recipe.data, tokenizer, seed=recipe.seed, budget=recipe.budget)
    arguments, count = arguments_of(recipe, folder, data.num_rows)
    model = build_model(recipe.model, tokenizer, seed=recipe.seed)
    trainer = InjectedFaults(model, arguments, train_dataset=FirstRows(data.rows, count))
    trainer.train(
        resume_from_checkpoint=get_last_checkpoint(str(folder)) if folder.exists() else None
    )
    trainer.save_model(str(folder / "final"))
    leave_processes()


def arguments_of(recipe: Recipe, folder: Path, num_rows: int) -> tuple[TrainingArguments, int]:
    """The same steps, batch, saves and learning rate; and how many rows there are."""
    length = run_length(recipe, num_rows, folder)
    arguments = TrainingArguments(
        **recipe.training,
        output_dir=str(folder),
        seed=recipe.seed,
        max_steps=length.steps,
        gradient_accumulation_steps=length.gradient_accumulation_steps,
        learning_rate=recipe.optimizer.learning_rate,
        save_strategy="steps",
        save_steps=recipe.checkpoints.every_steps or length.steps,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
        remove_unused_columns=False,
    )
    return arguments, 2 * length.rows  # as with most corpora, the steps end before the rows do


if __name__ == "__main__":
    main()
