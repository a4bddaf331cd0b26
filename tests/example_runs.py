"""A stage's trainer on a few examples made by hand, without files: what it does with them, in milliseconds."""

import random
from dataclasses import dataclass, field
from pathlib import Path

from tiny import TINY_LLAMA
from tiny_models import make_tokenizer
from torch.utils.data import Dataset

from cpt.data.rows.held_out import HeldOutSet
from cpt.recipe.schema import Recipe
from cpt.stages.build import stage_trainer
from cpt.stages.models import model_for
from cpt.training.arguments import training_arguments

FORMS = {"kto": "unpaired", **dict.fromkeys(("sft", "gkd", "distill"), "conversation")}


def example_rows(stage: str, count: int = 16) -> list[dict]:
    """Answers that begin with one token are better than those that begin with another."""
    draw = random.Random(0)
    rows = []
    for number in range(count):
        prompt = [draw.randrange(10, 60) for _ in range(draw.randrange(3, 9))]
        good, bad = [5, draw.randrange(10, 60), 2], [6, draw.randrange(10, 60), 7, 2]
        if stage == "kto":
            rows.append(
                {
                    "prompt_ids": prompt,
                    "completion_ids": good if number % 2 else bad,
                    "label": bool(number % 2),
                }
            )
        else:
            rows.append({"prompt_ids": prompt, "chosen_ids": good, "rejected_ids": bad})
    return rows


class Endless(Dataset):
    """The rows, again and again."""

    def __init__(self, rows: list[dict]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return 10**9

    def __getitem__(self, number: int) -> dict:
        return self.rows[number % len(self.rows)]

    def turn(self, number: int) -> tuple[int, int]:
        return 0, number


@dataclass
class Prepared:
    """What trainers ask of prepared data."""

    rows: Endless
    form: str
    num_rows: int
    num_tokens: int = 1000
    held_out: dict[str, HeldOutSet] = field(default_factory=dict)


def build_run(
    stage: str,
    folder: Path,
    *,
    steps: int = 4,
    training: dict | None = None,
    lora: dict | None = None,
    held_out: int = 0,
    rows: list[dict] | None = None,
    data: dict | None = None,
    config: dict | None = None,
):
    """The trainer of a stage, 4 rows a step unless `training` says otherwise."""
    model = {
        "from_scratch": True,
        "config": config or {**TINY_LLAMA, "vocab_size": 96},
        **({} if lora is None else {"lora": lora}),
    }
    sections = {
        "name": "run",
        "stage": stage,
        "output_dir": str(folder),
        "model": model,
        "tokenizer": {"path": "made"},
        "data": {"sequence_length": 64, "sources": [{"path": "made"}], **(data or {})},
        "budget": {"tokens": steps * 4 * 64},
        "optimizer": {"learning_rate": 3e-3},
        "training": {"per_device_train_batch_size": 4, "logging_steps": 1, **(training or {})},
    }
    recipe, tokenizer = Recipe.model_validate(sections), make_tokenizer()
    rows = rows or example_rows(stage)
    form = FORMS.get(stage, "preference")
    sets = {"pairs": HeldOutSet("pairs", rows[:held_out], held_out, form=form)} if held_out else {}
    data = Prepared(Endless(rows), form, len(rows), held_out=sets)
    arguments = training_arguments(recipe, folder / "run", data)
    built = model_for(recipe, tokenizer, arguments)
    return stage_trainer(recipe, built, tokenizer, data, arguments)
