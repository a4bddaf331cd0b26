"""Train by turns: SYSTEM FOLDER TURNS STEPS. Each line on standard input is a turn, answered by the processor seconds
of its steps."""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

from cpt.data.rows.build import build_data
from cpt.models.build import build_model
from cpt.optim.groups import parameter_groups
from cpt.recipe.schema import Recipe
from cpt.stages.build import build_trainer
from cpt.tokenizer.load import load_tokenizer
from cpt.training.liveness import Heartbeat
from cpt.training.preemption import Preemption

MARK = "seconds of a turn:"  # libraries print too
TOKENS_PER_ROW, VOCABULARY_SIZE, RATE, CLIPPED_AT, LOGGED_EVERY = 32, 512, 1e-3, 1.0, 10
CONFIG = {
    "model_type": "llama",
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 256,
    "vocab_size": VOCABULARY_SIZE,
    "max_position_embeddings": TOKENS_PER_ROW,
}


class Turns(TrainerCallback):
    """Waits for its turn, and answers with what the steps since the last one took: what threads did while it waited
    counts too."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.ended = 0.0

    def end(self, step: int) -> None:
        """A step is over; at the end of a turn, the others come first."""
        if step % self.steps == 0:
            now = time.process_time()
            print(MARK, now - self.ended, flush=True)
            self.ended = now
            sys.stdin.readline()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Told by a Trainer."""
        self.end(state.global_step)


class Rows(Dataset[dict[str, torch.Tensor]]):
    """The same row each time, so that reading costs nothing."""

    def __init__(self, number: int, row: dict[str, torch.Tensor]) -> None:
        self.number, self.row = number, row

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        return self.row


def recipe_of(folder: Path, steps: int) -> Recipe:
    """One row of a toy model in a step: the host is the limit."""
    sections = {
        "name": "step",
        "stage": "pretrain",
        "output_dir": str(folder / "runs"),
        "model": {"from_scratch": True, "config": CONFIG},
        "tokenizer": {"path": str(folder / "tokenizer")},
        "data": {
            "sequence_length": TOKENS_PER_ROW,
            "packing": "concatenate",
            "sources": [{"path": str(folder / "corpus.jsonl")}],
        },
        "budget": {"tokens": steps * TOKENS_PER_ROW},
        "optimizer": {"name": "adamw", "learning_rate": RATE},
        "training": {
            "per_device_train_batch_size": 1,
            "max_grad_norm": CLIPPED_AT,
            "logging_steps": LOGGED_EVERY,
            "use_cpu": True,
        },
    }
    return Recipe.model_validate(sections)


def ours(folder: Path, steps: int, turns: Turns) -> None:
    """All default guards, monitors and callbacks on, reading real rows."""
    recipe = recipe_of(folder, steps)
    tokenizer = load_tokenizer(recipe.tokenizer, recipe.model)
    data = build_data(recipe.data, tokenizer, seed=1)
    run = folder / "runs" / "step"
    run.mkdir(parents=True, exist_ok=True)
    with Preemption() as preemption, Heartbeat(run) as heartbeat:
        trainer = build_trainer(
            recipe,
            build_model(recipe.model, tokenizer, seed=1),
            tokenizer,
            data,
            watchers=(heartbeat, preemption),
        )
        trainer.add_callback(turns)
        trainer._save_checkpoint = lambda *_: None  # type: ignore[method-assign]
        trainer.train()


def inputs_of_others(
    folder: Path, steps: int
) -> tuple[nn.Module, dict[str, torch.Tensor], list[dict[str, Any]]]:
    """Model, row and parameter groups, the same as ours."""
    recipe = recipe_of(folder, steps)
    tokenizer = load_tokenizer(recipe.tokenizer, recipe.model)
    row = build_data(recipe.data, tokenizer, seed=1).rows[0]
    model = build_model(recipe.model, tokenizer, seed=1)
    return model, row, parameter_groups(model)


def plain_trainer(folder: Path, steps: int, turns: Turns) -> None:
    """Hugging Face's Trainer with its defaults, at the same batch, optimizer, clipping and interval of logs."""
    model, row, groups = inputs_of_others(folder, steps)
    arguments = TrainingArguments(
        output_dir=str(folder / "plain"),
        max_steps=steps,
        per_device_train_batch_size=1,
        max_grad_norm=CLIPPED_AT,
        logging_steps=LOGGED_EVERY,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
    )
    optimizer = torch.optim.AdamW(groups, lr=RATE, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    trainer = Trainer(
        model,
        arguments,
        train_dataset=Rows(steps, row),
        optimizers=(optimizer, schedule),
        callbacks=[turns],
    )
    trainer.log = lambda *_, **__: None  # type: ignore[method-assign]  # it would print
    trainer.train()


def bare_loop(folder: Path, steps: int, turns: Turns) -> None:
    """Nothing but the step, with the same clipping."""
    model, row, groups = inputs_of_others(folder, steps)
    optimizer = torch.optim.AdamW(groups, lr=RATE, fused=True)
    batch = {name: value[None] if value.dim() == 1 else value for name, value in row.items()}
    model.train()
    for step in range(1, steps + 1):
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIPPED_AT)
        optimizer.step()
        optimizer.zero_grad()
        turns.end(step)


SYSTEMS: dict[str, Callable[[Path, int, Turns], None]] = {
    "a bare loop": bare_loop,
    "the plain Trainer": plain_trainer,
    "cpt": ours,
}


def main(system: str, folder: Path, turns: int, steps: int) -> None:
    """The first turn is for everything that happens once."""
    torch.set_num_threads(1)
    SYSTEMS[system](folder, turns * steps, Turns(steps))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
