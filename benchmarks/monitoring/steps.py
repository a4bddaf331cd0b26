"""Train with and without what watches by turns, and write how long the steps took: FOLDER OUT SIZE STEPS."""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback

from benchmarks.guards.steps import prepare as prepare_words
from cpt.data.build import build_data
from cpt.models.build import build_model
from cpt.monitoring.callbacks import EVENTS
from cpt.monitoring.source_losses import SourceLosses
from cpt.recipe.schema import Recipe
from cpt.safety.heartbeat import Heartbeat
from cpt.stages.build import build_trainer
from cpt.stages.trainer import CPTTrainer
from cpt.tokenizer.load import load_tokenizer

ROWS_PER_STEP, TOKENS_PER_ROW = 8, 128
SIZES = {
    "small": (32, 512),
    "medium": (512, 8192),
}  # width, vocabulary; the head has a third of the medium one's weights
STEPS_OF_A_TURN = {"small": 20, "medium": 20}
LOG_EVERY = 10  # Hugging Face's and our default


class ByTurns(TrainerCallback):
    """Takes all that watches out for so many steps and puts it back for as many, and keeps the seconds of a step of
    each turn."""

    def __init__(self, trainer: CPTTrainer, steps: int) -> None:
        self.trainer, self.steps = trainer, steps
        self.samples: list[dict[str, float]] = []
        self.watches = False
        self.watchers: list[TrainerCallback] = []
        self.began = (0.0, 0.0)
        self.inside = 0.0
        """Seconds in the watchers themselves."""

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        """All callbacks are there."""
        for callback in self.trainer.callback_handler.callbacks:
            if type(callback).__module__.startswith("cpt.monitoring"):
                self.watchers.append(callback)
                for event in EVENTS:
                    if getattr(type(callback), event) is not getattr(TrainerCallback, event):
                        setattr(callback, event, self.timed(getattr(callback, event)))
                if isinstance(callback, SourceLosses):
                    callback.look = self.timed(callback.look)

    def timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same, its time added up."""

        def around(*arguments: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*arguments, **options)
            finally:
                self.inside += time.perf_counter() - began

        return around

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        """A turn ends behind the log of its last step, and the next begins."""
        if state.global_step % self.steps:
            return
        now = (time.perf_counter(), time.process_time())
        if state.global_step > self.steps:  # the first turn warms up
            wall, processor = ((after - before) / self.steps for after, before in zip(now, self.began, strict=True))
            self.samples.append(
                {"watched": self.watches, "wall": wall, "processor": processor, "inside": self.inside / self.steps}
            )
        self.watches = not self.watches
        handler = self.trainer.callback_handler
        others = [callback for callback in handler.callbacks if callback not in self.watchers]
        handler.callbacks = [*others, *self.watchers] if self.watches else others
        for callback in self.watchers:
            if isinstance(callback, SourceLosses):
                callback.is_looking = False
        self.inside = 0.0
        self.began = (time.perf_counter(), time.process_time())


def recipe_of(folder: Path, size: str, steps: int) -> Recipe:
    """A model of this size on two sources of words drawn at random, watched with all that a recipe can ask for."""
    (width, vocabulary), tokens_per_step = SIZES[size], ROWS_PER_STEP * TOKENS_PER_ROW
    config = {
        "model_type": "llama",
        "hidden_size": width,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 3 * width,
        "vocab_size": vocabulary,
        "max_position_embeddings": TOKENS_PER_ROW,
    }
    callbacks = [
        {"name": "cost", "dollars_per_gpu_hour": 2.5},
        {"name": "alert", "figure": "grad_norm", "above": 1e9},
        {"name": "benchmarks.monitoring.steps:watch"},
    ]
    sections = {
        "name": f"monitoring-{size}",
        "stage": "pretrain",
        "output_dir": str(folder / "runs"),
        "model": {"from_scratch": True, "config": config},
        "tokenizer": {"path": str(folder / "tokenizer")},
        "data": {
            "sequence_length": TOKENS_PER_ROW,
            "sources": [{"path": str(folder / f"{name}.jsonl")} for name in ("one", "other")],
        },
        "budget": {"tokens": steps * tokens_per_step, "global_batch_tokens": tokens_per_step},
        "monitoring": {"callbacks": callbacks},
        "training": {"per_device_train_batch_size": 2, "logging_steps": LOG_EVERY, "use_cpu": True},
    }
    return Recipe.model_validate(sections)


def watch(figures: dict[str, float]) -> str | None:
    """A function of a user's."""
    return "The loss is no number." if figures.get("loss", 0.0) != figures.get("loss", 0.0) else None


def prepare(folder: Path) -> None:
    """Two sources and a tokenizer."""
    prepare_words(folder)
    for name in ("one", "other"):
        (folder / f"{name}.jsonl").write_text((folder / "corpus.jsonl").read_text())


def main(folder: Path, out: Path, size: str, steps: int) -> None:
    """Train, and write the samples."""
    torch.set_num_threads(1)
    recipe = recipe_of(folder, size, steps)
    tokenizer = load_tokenizer(recipe.tokenizer, recipe.model)
    data = build_data(recipe.data, tokenizer, seed=1)
    model: nn.Module = build_model(recipe.model, tokenizer, seed=1)
    run = recipe.output_dir / recipe.name
    run.mkdir(parents=True, exist_ok=True)
    trainer = build_trainer(recipe, model, tokenizer, data, watchers=(Heartbeat(run),))
    turns = ByTurns(trainer, STEPS_OF_A_TURN[size])
    trainer.callback_handler.callbacks.insert(0, turns)
    trainer._save_checkpoint = lambda *_: None
    trainer.train()
    out.write_text(json.dumps(turns.samples))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
