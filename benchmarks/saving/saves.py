"""Train, and save as the Trainer does, as we do, and behind the training: RECIPE OUT; by torchrun on several
processes.

Every other step is saved in all ways, in an order that changes from round to round: each save into an empty folder, on
a disk that has nothing else left to write, with memory at hand for what the system holds of it. The last of them is
behind the training, and the step after it goes on meanwhile.
"""

import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import Trainer, TrainerCallback

from cpt.data.rows.build import build_data
from cpt.distributed import is_main_process, join_processes, leave_processes, start_deepspeed
from cpt.files import make_durable
from cpt.models.build import build_model
from cpt.recipe.load import load_recipe
from cpt.stages.build import build_trainer
from cpt.tokenizer.load import load_tokenizer
from cpt.training.arguments import training_arguments, weights_dtype
from cpt.training.trainer import CPTTrainer

STEPS_IN_ROUND = 2


class InAllWays(TrainerCallback):
    """Saves every other step in all ways, and keeps the seconds: of the clock, and of all processes' processors."""

    def __init__(self, trainer: CPTTrainer) -> None:
        self.trainer = trainer
        self.samples: list[dict[str, float]] = []
        self.waited = self.copying = 0.0
        ours = trainer.checkpointer
        self.wait_for_copies, self.copy_to_host = ours.wait_for_copies, ours.copy_to_host
        trainer._save_checkpoint = lambda *_: None  # type: ignore  # the run's end is of no interest
        ours.wait_for_copies = self.wait  # type: ignore[method-assign]
        ours.copy_to_host = self.copy  # type: ignore[method-assign]
        ours.kinds_read_back.add("full")  # once in a run, and not the cost of a save

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.waited, self.began = 0.0, time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A step that is saved, or the one after it."""
        seconds = time.perf_counter() - self.began
        if state.global_step % STEPS_IN_ROUND:
            self.samples.append({"step": seconds, "load": os.getloadavg()[0]})
            ways = [self.save_theirs, self.save_ours]
            first = len(self.samples) % len(ways)
            for way in ways[first:] + ways[:first]:
                way()
            self.begin_behind()
        else:
            self.end_behind(seconds)

    # --- the ways ----------------------------------------------------------------------------------------------------

    def save_theirs(self) -> None:
        """As the Trainer does, which does not wait for the disk; then the wait."""
        trainer = self.trainer
        self.measure("theirs", lambda: Trainer._save_checkpoint(trainer, trainer.model, None))
        saved = self.folder / f"checkpoint-{trainer.state.global_step}"
        self.measure("syncing_theirs", lambda: sync_files(saved), clears=False)
        self.samples[-1]["bytes"] = sum(
            path.stat().st_size for path in saved.rglob("*") if path.is_file()
        )

    def save_ours(self) -> None:
        self.measure("ours", partial(self.save_once, in_background=False))

    def begin_behind(self) -> None:
        self.measure("held", partial(self.save_once, in_background=True))

    def end_behind(self, step_seconds: float) -> None:
        sample = self.samples[-1]
        sample |= {"step_beside": step_seconds - self.waited, "waited": self.waited}
        self.trainer.checkpointer.wait()
        sample["copying"] = self.copying
        assert self.trainer.checkpointer.save_failure is None, (
            self.trainer.checkpointer.save_failure
        )

    # --- how they are measured ---------------------------------------------------------------------------------------

    @property
    def folder(self) -> Path:
        return Path(str(self.trainer.args.output_dir))

    def save_once(self, *, in_background: bool) -> None:
        ours = self.trainer.checkpointer
        ours.settings = ours.settings.model_copy(update={"in_background": in_background})
        ours.wait()
        ours.save(self.trainer.contents("full"), "full")

    def measure(self, name: str, work: Callable[[], object], *, clears: bool = True) -> None:
        """Do it under the same conditions as the others, and note what it took until the last process was through."""
        if clears and is_main_process():
            for old in self.folder.glob("checkpoint-*"):
                shutil.rmtree(old)
            os.sync()
            bring_memory(int(1.1 * self.samples[max(0, len(self.samples) - 2)].get("bytes", 0)))
        together()
        wall, processor = time.perf_counter(), time.process_time()
        work()
        processor = time.process_time() - processor
        together()
        self.samples[-1] |= {
            name: time.perf_counter() - wall,
            f"{name}_processor": in_all(processor),
        }

    def wait(self, *arguments: Any) -> None:
        """What an optimizer does first; its seconds count."""
        began = time.perf_counter()
        self.wait_for_copies(*arguments)
        self.waited += time.perf_counter() - began

    def copy(self, *arguments: Any) -> None:
        """What a next update that came at once would wait for."""
        began = time.perf_counter()
        self.copy_to_host(*arguments)
        self.copying = time.perf_counter() - began


def bring_memory(size: int) -> None:
    """Use memory and free it: a virtual machine may have given what was free for seconds to its host, and getting it
    back takes as long as a save, which whichever save came first would pay for."""
    torch.empty(size, dtype=torch.uint8).fill_(1)


def together() -> None:
    if dist.is_initialized():
        dist.barrier()


def in_all(seconds: float) -> float:
    total = torch.tensor(seconds, dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(total)
    return float(total)


def sync_files(folder: Path) -> None:
    """Wait until the disk has them, as a save must to survive a power cut."""
    if is_main_process():
        for path in folder.rglob("*"):
            make_durable(path)


def main() -> None:
    recipe, out = load_recipe(sys.argv[1]), Path(sys.argv[2])
    launch = join_processes(recipe.training)
    start_deepspeed(launch)
    tokenizer = load_tokenizer(recipe.tokenizer, recipe.model)
    data = build_data(recipe.data, tokenizer, seed=recipe.seed, budget=recipe.budget)
    arguments = training_arguments(
        recipe, recipe.output_dir / recipe.name, data, deepspeed=launch.deepspeed_config
    )
    model = build_model(
        recipe.model,
        tokenizer,
        seed=recipe.seed,
        dtype=weights_dtype(recipe, arguments),
        mixed_precision=arguments.bf16,
    )
    trainer = build_trainer(recipe, model, tokenizer, data, arguments)
    assert isinstance(trainer, CPTTrainer)
    ways = InAllWays(trainer)
    trainer.add_callback(ways)
    trainer.train()
    if is_main_process():
        shutil.rmtree(arguments.output_dir or "")
        out.write_text(json.dumps(ways.samples[1:]))  # the first one finds no memory for copies yet
    leave_processes()


if __name__ == "__main__":
    main()
