"""Train with and without guards by turns, and write how long each step took: FOLDER OUT SIZE STEPS; by torchrun for
several processes."""

import json
import random
import sys
import time
from pathlib import Path

import torch
from torch import nn
from transformers import TrainerCallback

from cpt.contrib.tokenizers.train_bpe import train_bpe
from cpt.data.rows.build import build_data
from cpt.distributed import is_main_process, join_processes, leave_processes
from cpt.models.build import build_model
from cpt.recipe.schema import Recipe
from cpt.stages.build import build_trainer
from cpt.tokenizer.load import load_tokenizer
from cpt.training.liveness import Heartbeat
from cpt.training.preemption import Preemption
from cpt.training.step import CheckedStep
from cpt.training.trainer import CPTTrainer

ROWS_PER_STEP, TOKENS_PER_ROW = 8, 128
SIZES = {
    "small": 32,
    "medium": 512,
}  # width; what guards cost does not depend on it, and shows where all else is little
VOCABULARY_SIZE = 512
GUARDS = (CheckedStep, Heartbeat, Preemption)


class ByTurns(TrainerCallback):
    """Takes the guards out of every other step and puts them back, and keeps wall-clock and processor seconds of all
    steps."""

    def __init__(self, trainer: CPTTrainer) -> None:
        self.trainer = trainer
        self.samples: list[dict[str, float]] = []
        self.began = (0.0, 0.0)

    def on_step_end(self, args, state, control, **kwargs) -> None:
        """The step before ends, with what the guards do at its end; the next begins."""
        now = (time.perf_counter(), time.process_time())
        if state.global_step > 1:
            wall, processor = (
                after - before for after, before in zip(now, self.began, strict=True)
            )
            guarded = self.trainer.guard.detector is not None
            self.samples.append({"guarded": guarded, "wall": wall, "processor": processor})
        if state.global_step == 1:
            handler = self.trainer.callback_handler
            self.guards = [
                callback for callback in handler.callbacks if isinstance(callback, GUARDS)
            ]
            self.detector = self.trainer.guard.detector
        self.turn(on=state.global_step % 2 == 0)
        self.began = (time.perf_counter(), time.process_time())

    def turn(self, *, on: bool) -> None:
        handler, trainer = self.trainer.callback_handler, self.trainer
        others = [callback for callback in handler.callbacks if not isinstance(callback, GUARDS)]
        handler.callbacks = [*others, *self.guards] if on else others
        if not on and self.detector is not None:
            list(self.detector.read())
        trainer.guard.detector = self.detector if on else None


def recipe_of(folder: Path, size: str, steps: int) -> Recipe:
    """A model of this size on words drawn at random."""
    corpus, tokenizer, width = folder / "corpus.jsonl", folder / "tokenizer", SIZES[size]
    config = {
        "model_type": "llama",
        "hidden_size": width,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 3 * width,
        "vocab_size": VOCABULARY_SIZE,
        "max_position_embeddings": TOKENS_PER_ROW,
    }
    sections = {
        "name": "guards",
        "stage": "pretrain",
        "output_dir": str(folder / "runs"),
        "model": {"from_scratch": True, "config": config},
        "tokenizer": {"path": str(tokenizer)},
        "data": {"sequence_length": TOKENS_PER_ROW, "sources": [{"path": str(corpus)}]},
        "budget": {
            "tokens": steps * ROWS_PER_STEP * TOKENS_PER_ROW,
            "global_batch_tokens": ROWS_PER_STEP * TOKENS_PER_ROW,
        },
        "training": {"per_device_train_batch_size": 2, "logging_steps": 10**6, "use_cpu": True},
    }
    return Recipe.model_validate(sections)


def prepare(folder: Path) -> None:
    draw = random.Random(1)
    words = ["".join(draw.choices("abcdefghijklmnop", k=draw.randint(2, 9))) for _ in range(900)]
    texts = [" ".join(draw.choices(words, k=200)) for _ in range(400)]
    (folder / "corpus.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in texts)
    )
    train_bpe(texts, VOCABULARY_SIZE, folder / "tokenizer")


def main(folder: Path, out: Path, size: str, steps: int) -> None:
    """Train, and write the samples of the main process."""
    torch.set_num_threads(1)
    recipe = recipe_of(folder, size, steps)
    join_processes(recipe.training)
    tokenizer = load_tokenizer(recipe.tokenizer, recipe.model)
    data = build_data(recipe.data, tokenizer, seed=1)
    model: nn.Module = build_model(recipe.model, tokenizer, seed=1)
    run = folder / "runs" / "guards"
    run.mkdir(parents=True, exist_ok=True)
    with Preemption() as preemption:
        trainer = build_trainer(
            recipe, model, tokenizer, data, watchers=(Heartbeat(run), preemption)
        )
        assert isinstance(trainer, CPTTrainer)
        turns = ByTurns(trainer)
        trainer.callback_handler.callbacks.insert(0, turns)
        trainer._save_checkpoint = lambda *_: None
        trainer.train()
    if is_main_process():
        out.write_text(json.dumps(turns.samples))
    leave_processes()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
