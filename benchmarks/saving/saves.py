"""Train, and save by turns as the Trainer does, as we do, and behind the training: RECIPE OUT; by torchrun on several processes.

After each step that saves comes one that does not: behind the training it is the one that goes on meanwhile.
"""

import json
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers import Trainer, TrainerCallback

from cpt.checkpoints.manifest import make_durable
from cpt.data.build import build_data
from cpt.launchers.processes import join_processes, leave_processes, start_deepspeed
from cpt.models.build import build_model
from cpt.ranks import is_main_process
from cpt.recipe.load import load_recipe
from cpt.stages.arguments import training_arguments, weights_dtype
from cpt.stages.build import build_trainer
from cpt.stages.trainer import CPTTrainer
from cpt.tokenizer.load import load_tokenizer

WAYS = ("theirs", "ours", "behind")
STEPS_IN_ROUND = 2 * len(WAYS)


class ByTurns(TrainerCallback):
    """Says at each step whether and how it is saved, and keeps the seconds."""

    def __init__(self, trainer: CPTTrainer) -> None:
        self.trainer = trainer
        self.samples: list[dict[str, float]] = []
        self.way: str | None = None
        self.waited = 0.0
        self.wait_for_copies = trainer.wait_for_copies
        trainer._save_checkpoint = self.save  # type: ignore[method-assign]
        trainer.wait_for_copies = self.wait  # type: ignore[method-assign]
        trainer.kinds_read_back.add("full")  # once in a run, and not the cost of a save

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Its clock starts."""
        self.waited, self.began = 0.0, time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Its clock stops; every other step is saved."""
        turn, follows_a_save = divmod(state.global_step - 1, 2)
        if follows_a_save and self.way is not None:
            self.after_save(time.perf_counter() - self.began)
        self.way = None if follows_a_save else WAYS[turn % len(WAYS)]
        control.should_save = self.way is not None

    def after_save(self, step_seconds: float) -> None:
        """The step after a save is done."""
        sample = self.samples[-1]
        sample[f"step_after_{self.way}"] = step_seconds - self.waited
        if self.way == "behind":
            sample["waited"] = self.waited
            sample["until_published"] = timed(self.trainer.in_flight.wait)
            assert self.trainer.save_failure is None, self.trainer.save_failure

    def save(self, model: Any, trial: Any) -> None:
        """In this step's way, into an empty folder on an idle disk; the run's end is of no interest."""
        if self.way is None:
            return
        folder = Path(str(self.trainer.args.output_dir))
        if is_main_process():
            for old in folder.glob("checkpoint-*"):
                shutil.rmtree(old)
            make_durable(folder)
        if self.way == "theirs":
            self.samples.append({"theirs": timed(lambda: Trainer._save_checkpoint(self.trainer, model, trial))})
            saved = folder / f"checkpoint-{self.trainer.state.global_step}"
            self.samples[-1]["until_synced"] = timed(lambda: sync_files(saved))
            self.samples[-1]["bytes"] = sum(path.stat().st_size for path in saved.rglob("*") if path.is_file())
            return
        checkpoints = self.trainer.recipe.checkpoints.model_copy(update={"in_background": self.way == "behind"})
        self.trainer.recipe = self.trainer.recipe.model_copy(update={"checkpoints": checkpoints})
        self.samples[-1]["held" if self.way == "behind" else "ours"] = timed(lambda: self.trainer.save_once("full"))

    def wait(self, *arguments: Any) -> None:
        """What an optimizer does first; its seconds count."""
        began = time.perf_counter()
        self.wait_for_copies(*arguments)
        self.waited += time.perf_counter() - began


def timed(work: Callable[[], object]) -> float:
    """Seconds until the last process is through."""
    together()
    began = time.perf_counter()
    work()
    together()
    return time.perf_counter() - began


def together() -> None:
    """All processes are here."""
    if dist.is_initialized():
        dist.barrier()


def sync_files(folder: Path) -> None:
    """Wait until the disk has them, as a save that stands a power cut must."""
    if is_main_process():
        for path in folder.rglob("*"):
            make_durable(path)


def main() -> None:
    """Measure, and write the samples."""
    recipe, out = load_recipe(sys.argv[1]), Path(sys.argv[2])
    launch = join_processes(recipe.training)
    start_deepspeed(launch)
    tokenizer = load_tokenizer(recipe.tokenizer, recipe.model)
    data = build_data(recipe.data, tokenizer, seed=recipe.seed, budget=recipe.budget)
    arguments = training_arguments(recipe, recipe.output_dir / recipe.name, data, deepspeed=launch.deepspeed_config)
    model = build_model(recipe.model, tokenizer, seed=recipe.seed, dtype=weights_dtype(recipe, arguments), mixed_precision=arguments.bf16)
    trainer = build_trainer(recipe, model, tokenizer, data, arguments)
    assert isinstance(trainer, CPTTrainer)
    turns = ByTurns(trainer)
    trainer.add_callback(turns)
    trainer.train()
    if is_main_process():
        shutil.rmtree(arguments.output_dir or "")
        out.write_text(json.dumps(turns.samples[1:]))  # the first one finds no memory for copies yet
    leave_processes()


if __name__ == "__main__":
    main()
