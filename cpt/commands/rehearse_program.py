"""Run one part of a rehearsal: `rehearse_program.py PART RECIPE REPORTS`, started by the run's launcher."""

import json
import math
import resource
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

# first: it silences libraries that the others import
from cpt.command_line import LocalRank, run_command, show_log

# isort: split
import numpy as np
import torch
import typer
from torch.utils.data import Dataset
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.utils.logging import disable_progress_bar

from cpt.cache import default_cache_dir
from cpt.commands.train import check_and_train
from cpt.data.rows.held_out import held_out_set
from cpt.data.rows.packing import Layout, PackedRows
from cpt.distributed import leave_processes, rank
from cpt.errors import Interrupted
from cpt.evaluation.scoring import PromptSamples
from cpt.hf_internals import IGNORED
from cpt.recipe.load import load_recipe
from cpt.training.trainer import CPTTrainer

SAVED_STEP = 2
LAST_STEP = 4
LONGEST_ROWS_STEPS = 2  # the first creates the optimizer's states, the second starts with them
EVALUATED_DOCUMENTS = 64  # the longest of each held-out set, which need the most memory
PROMPTS_READ = 4096
ANSWERS = ("chosen_ids", "rejected_ids", "completion_ids")


class EnoughSteps(Interrupted):
    """The part has trained enough steps."""


class EndAtLog(TrainerCallback):
    """Stop at the first logged loss at or after a step; must come after the callbacks that write the log."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if "loss" in kwargs["logs"] and state.global_step >= min(self.step, state.max_steps):
            raise EnoughSteps(f"ended after {state.global_step} steps, as requested")


class Rehearsed(TrainerCallback):
    """Measure steps, evaluate and save after one of them, and stop early."""

    def __init__(self, reports: Path, *, evaluates: bool) -> None:
        self.report = reports / f"rank-{rank()}.json"
        self.evaluates = evaluates
        self.began = 0.0

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self.began = time.perf_counter()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if args.device.type == "cuda":
            torch.cuda.synchronize()
        measurements = {"seconds": time.perf_counter() - self.began}
        # The peaks of this process, in bytes.
        measurements["host"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        if torch.cuda.is_initialized():
            device = torch.cuda.get_device_properties(torch.cuda.current_device())
            measurements["gpu"] = torch.cuda.max_memory_reserved()
            measurements["gpu_total"] = device.total_memory
        self.report.write_text(json.dumps(measurements))
        step = state.global_step
        if step == min(SAVED_STEP, max(1, state.max_steps - 1)):
            control.should_save = True
            control.should_evaluate = self.evaluates
        elif step >= LAST_STEP:
            control.should_training_stop = True


class LongestRows(Dataset[dict[str, Any]]):
    """Rows as long as the recipe allows, made of the run's tokens.

    Packed rows hold two documents, since the mask between them takes memory. Prompts have one token, so that nearly
    the whole row is scored. Generated completions have the maximal length.
    """

    def __init__(self, trainer: CPTTrainer) -> None:
        self.rows = trainer.rows
        self.length = trainer.recipe.data.sequence_length
        generation = vars(trainer).get("generation_config")
        self.model_writes = generation is not None
        if generation is not None:
            generation.min_new_tokens = generation.max_new_tokens
        self.longest_prompt = None
        first = self.rows[0]
        if "prompt" in first and "prompt_ids" not in first:
            num_prompts = min(trainer.length.rows, PROMPTS_READ)
            prompts = (self.rows[number] for number in range(num_prompts))
            self.longest_prompt = max(prompts, key=lambda row: len(str(row["prompt"])))

    def __getitem__(self, number: int) -> dict[str, Any]:
        row = self.rows[number]
        if self.longest_prompt is not None:
            return self.longest_prompt
        if "prompt_ids" in row:
            answers = [name for name in ANSWERS if name in row]
            tokens = list(row["prompt_ids"])
            for name in answers:
                tokens += row[name]
            tokens = (tokens * math.ceil(self.length / len(tokens)))[: self.length]
            return {**row, "prompt_ids": tokens[:1], **dict.fromkeys(answers, tokens[1:])}
        tokens_of_row = row["input_ids"].flatten()
        ids = tokens_of_row.repeat(math.ceil(self.length / len(tokens_of_row)))[: self.length]
        labels = ids.clone()
        positions = torch.arange(self.length)
        labels[0] = IGNORED
        example = {"input_ids": ids, "labels": labels, "position_ids": positions}
        if "attention_mask" in row:
            # With a token budget a row is a whole batch: one document of all its tokens.
            example["attention_mask"] = torch.ones_like(ids)
            return {name: values[None] for name, values in example.items()}
        half = self.length // 2
        if self.model_writes:
            labels[:-1] = IGNORED
        elif half > 0:
            labels[half] = IGNORED
            positions[half:] -= half
        return example


def prepare(trainer: CPTTrainer, part: str, reports: Path) -> None:
    if part != "first_steps":
        trainer.args.eval_on_start = False
        trainer.remove_callback(PromptSamples)
    if part == "longest_rows":
        trainer.rows = LongestRows(trainer)
        trainer.add_callback(EndAtLog(LONGEST_ROWS_STEPS))
    packing = trainer.recipe.data.packing
    sets = dict(trainer.held_out)
    for name, held_out in trainer.held_out.items():
        rows = held_out.rows
        documents = held_out.chosen
        if documents is not None and isinstance(rows, PackedRows):
            lengths = np.diff(rows.documents.offsets)[documents]
            longest_first = np.argsort(-lengths, kind="stable")
            longest = documents[np.sort(longest_first[:EVALUATED_DOCUMENTS])]
            layout = Layout(rows.sequence_length, packing, None, rows.pad, held_out.form)
            sets[name] = held_out_set(name, rows.documents, longest, layout, default_cache_dir())
    trainer.held_out = sets
    trainer.add_callback(Rehearsed(reports, evaluates=bool(sets)))


def command(
    part: Annotated[str, typer.Argument(help="longest_rows, first_steps or resumed.")],
    recipe: Annotated[Path, typer.Argument(help="The rehearsed recipe.")],
    reports: Annotated[Path, typer.Argument(help="Folder for the measurements.")],
    local_rank: LocalRank = None,
) -> None:
    """Run one part."""
    train_in_own_process(recipe, lambda trainer: prepare(trainer, part, reports))


def train_in_own_process(recipe: Path, ready: Callable[[CPTTrainer], None]) -> None:
    """Train to the end or until `EnoughSteps`, then exit."""
    show_log()
    disable_progress_bar()
    with suppress(EnoughSteps):
        check_and_train(load_recipe(recipe), ready=ready)
    leave_processes()


if __name__ == "__main__":
    run_command(command)
