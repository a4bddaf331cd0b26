"""Evaluate while a run trains: samples of what the model writes, and a stop before it forgets too much."""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from cpt.data.store.tokenization import adds_bos
from cpt.distributed import is_main_process
from cpt.errors import Interrupted
from cpt.evaluation.scoring import evaluation_mode
from cpt.files import LinesFile
from cpt.runs.events import record_event
from cpt.runs.folder import EVALUATED, METRICS, Content, is_bits_per_byte, keep_lines_until, read_lines, set_name
from cpt.runs.record import Run

log = logging.getLogger("cpt")


@dataclass(frozen=True)
class Point:
    step: int
    tokens: int
    bits_per_byte: dict[str, float]  # by held-out set


class StopWhenForgetting(TrainerCallback):
    """End the training when an evaluation finds that a general set has become worse than the recipe allows.

    Args:
        allowed: held-out set -> the largest rise of its bits per byte, as a share of the value before the first step,
            which a resumed run reads from metrics.jsonl; None allows any.
    """

    def __init__(self, run: Run, allowed: Mapping[str, float | None]) -> None:
        self.run = run
        self.allowed = {name: rise for name, rise in allowed.items() if rise is not None}
        self.before: dict[str, float] = {}

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        course = read_course(self.run.folder / METRICS) if state.global_step else []
        self.before = dict(course[0].bits_per_byte) if course and course[0].step == 0 else {}

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        now = bits_per_byte_of(kwargs["metrics"])
        if not self.before:
            self.before = now
            return
        for name, rise in self.allowed.items():
            if name in now and now[name] > self.before[name] * (1 + rise):
                control.should_training_stop = True
                reason = (
                    f"stopped at step {state.global_step}: bits per byte of `{name}` rose from {self.before[name]:.4f}"
                    f" to {now[name]:.4f} ({now[name] / self.before[name] - 1:+.1%}), more than the {rise:.1%} that"
                    " `evaluation.retain` allows"
                )
                if is_main_process():
                    log.warning(
                        f"{reason}. The learning rate had not come down yet. To go further: more replay (general"
                        " sources weigh more), a lower `optimizer.learning_rate`, or LoRA."
                    )
                self.run.write_status("running", step=state.global_step, steps=state.max_steps, stopped=reason)


def bits_per_byte_of(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {set_name(key): float(value) for key, value in metrics.items() if is_bits_per_byte(key)}


def read_evaluations(metrics: Path) -> list[Content]:
    """The lines of a metrics.jsonl with something that was evaluated."""
    lines = [line for line in read_lines(metrics) if {"step", "tokens"} <= line.keys()]
    return [line for line in lines if any(key.startswith(EVALUATED) for key in line)]


def read_course(metrics: Path) -> list[Point]:
    return course_of(read_evaluations(metrics))


def course_of(evaluations: Sequence[Content]) -> list[Point]:
    """The evaluations of held-out text, in order; the last one of a step that was evaluated twice."""
    points: dict[int, Point] = {}
    for line in evaluations:
        if figures := bits_per_byte_of(line):
            points[line["step"]] = Point(line["step"], line["tokens"], figures)
    return [points[step] for step in sorted(points)]


class PromptSamples(TrainerCallback):
    """Continue the recipe's prompts before the first and after the last step, one JSON line each: step, prompt,
    continuation. `before_each` is called before each prompt; it raises Interrupted on all processes to stop."""

    def __init__(
        self,
        path: Path,
        tokenizer: PreTrainedTokenizerBase,
        prompts: Sequence[str],
        max_new_tokens: int = 64,
        before_each: Callable[[], None] = lambda: None,
    ) -> None:
        self.lines = LinesFile(path)
        self.tokenizer = tokenizer
        self.prompts = prompts
        self.max_new_tokens = max_new_tokens
        self.before_each = before_each

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """A resumed run has its first samples."""
        if state.global_step == 0:
            self.sample(kwargs["model"], 0, control)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.sample(kwargs["model"], state.global_step, control)

    def sample(self, model: nn.Module, step: int, control: TrainerControl) -> None:
        """Every process generates, as ZeRO-3 needs; the main one writes. On a full disk, lines wait in memory."""
        options: dict[str, Any] = {"max_new_tokens": self.max_new_tokens, "before_each": self.before_each}
        try:
            continuations = continue_prompts(model, self.tokenizer, self.prompts, **options)
        except Interrupted:
            control.should_training_stop = True
            return
        if not is_main_process():
            return
        path = self.lines.path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            keep_lines_until(path, step - 1)  # a run that was killed after its samples writes them again
        except OSError as problem:
            record_event(path.parent, "not_written", f"{path.name} cannot be changed: {problem.strerror}.", step=step)
        for prompt, continuation in zip(self.prompts, continuations, strict=True):
            sample = {"step": step, "prompt": prompt, "continuation": continuation}
            self.lines.add(json.dumps(sample, ensure_ascii=False))
        if self.lines.waiting:
            text = f"The disk is full: samples of step {step} are lost if it stays full until the run ends."
            record_event(path.parent, "not_written", text, step=step)


def continue_prompts(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    *,
    max_new_tokens: int = 64,
    before_each: Callable[[], None] = lambda: None,
) -> list[str]:
    """Generate greedily until the document ends or `max_new_tokens` are reached; a prompt gets the begin token if the
    tokenizer adds one, as in training. Every process of the run must call it, and all get the same texts. The model
    may be wrapped by DDP or DeepSpeed; its mode, its configs and the random state do not change."""
    # DDP and a DeepSpeed engine have the module that generates as `module`.
    is_generator = isinstance(model, PreTrainedModel) or "base_model" in dict(model.named_children())
    generator: Any = model if is_generator and not isinstance(model, DistributedDataParallel) else model.module
    device = next(generator.parameters()).device
    begin = [tokenizer.bos_token_id] if adds_bos(tokenizer) else []
    continuations = []
    # The model's own generation config may sample or penalize, and training sets `use_cache=False`.
    before, used_cache = generator.generation_config, generator.config.use_cache
    generator.generation_config = GenerationConfig(
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        use_cache=True,
    )
    generator.config.use_cache = True
    try:
        with evaluation_mode(model):
            for prompt in prompts:
                before_each()
                ids = torch.tensor([begin + tokenizer(prompt, add_special_tokens=False)["input_ids"]], device=device)
                # Under ZeRO-3 generate keeps the processes in step by itself (synced_gpus).
                written = generator.generate(input_ids=ids, attention_mask=torch.ones_like(ids))
                continuations.append(str(tokenizer.decode(written[0, ids.shape[1] :], skip_special_tokens=True)))
    finally:
        generator.generation_config, generator.config.use_cache = before, used_cache
    return continuations
