"""Measure the losses of held-out documents, and evaluate during training."""

import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
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
from transformers.trainer_callback import ExportableState

from cpt.data.rows.held_out import HeldOutSet
from cpt.data.rows.packing import PackedRows, stack_rows
from cpt.data.store.tokenization import adds_bos
from cpt.distributed import has_process_group, is_main_process
from cpt.errors import DataError, Interrupted, RecipeError
from cpt.evaluation.paired import DocumentLosses, save_losses, saved_losses
from cpt.files import LinesFile
from cpt.models.fused_loss import fused_scores
from cpt.recipe.schema import EarlyStop
from cpt.runs.events import record_event
from cpt.runs.folder import (
    BITS_PER_BYTE,
    EVALUATED,
    HELD_OUT,
    METRICS,
    Content,
    is_bits_per_byte,
    keep_lines_until,
    read_lines,
    set_name,
)
from cpt.runs.record import Run

POSITIONS_AT_ONCE = 1024  # fp32 logits at a time: 1 GiB for a vocabulary of 256k instead of 8 GiB for a row of 8,192
AfterBatch = Callable[[], None]


@dataclass(frozen=True)
class ScoredBatch:
    """Scores of some rows: B sequences of T tokens, of which T - 1 can be predicted."""

    rows: Sequence[int]  # row numbers
    position_ids: torch.Tensor  # [B, T] on the host, restarting with each piece of a document
    nats: torch.Tensor  # [B, T - 1] float64, of the next token; 0 if it is not predicted
    is_predicted: torch.Tensor  # [B, T - 1]
    is_correct: torch.Tensor  # [B, T - 1]: the next token had the highest probability


def sum_over_processes(sums: torch.Tensor) -> None:
    """Sum in place over all processes, if there are several."""
    if has_process_group():
        dist.all_reduce(sums)


def scored_batches(
    model: nn.Module,
    held_out_set: HeldOutSet,
    batch_size: int,
    after_batch: AfterBatch | None = None,
) -> Iterator[ScoredBatch]:
    """Yield scores of this process's rows. The model may be wrapped by DDP or DeepSpeed; its mode and the random state
    are preserved. The scores do not depend on the batch size."""
    # DDP's forward would synchronise buffers, so unwrap it; DeepSpeed's gathers the parameters and must be used.
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    device = next(model.parameters()).device
    is_batch = held_out_set.rows[0]["input_ids"].dim() == 2  # `packing: token_budget`
    with evaluation_mode(model), fused_scores(model) as fused:
        for numbers, counts in batches(len(held_out_set.rows), 1 if is_batch else batch_size):
            rows = [held_out_set.rows[number] for number in numbers]
            on_host = stack_rows(rows)
            batch = {key: without_waiting(values, device) for key, values in on_host.items()}
            labels = batch.pop("labels")
            if fused is not None and (scored := fused.score(inner, batch, labels)) is not None:
                nats, is_correct = (values[:, :-1] for values in scored)
                scores = nats.double(), labels[:, 1:] != -100, is_correct
            else:
                # With a cache or a mask, transformers would ignore the restarts of positions; packed rows have
                # no mask.
                scores = score_tokens(inner(**batch, use_cache=False).logits, labels)
            if counts:
                yield ScoredBatch(numbers, on_host["position_ids"], *scores)
            if after_batch is not None:
                after_batch()


def without_waiting(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy to the device. From memory that is not page-locked, the host would wait for a GPU's earlier work."""
    if device.type == "cuda":
        values = values.pin_memory()
    return values.to(device, non_blocking=True)


def batches(num_items: int, batch_size: int) -> Iterator[tuple[Sequence[int], bool]]:
    """This process's item numbers in batches, each with whether it counts. Every process gets the same number of
    batches, which ZeRO-3 needs to gather parameters: a process without items left repeats the first batch."""
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if has_process_group() else (0, 1)
    mine = range(rank, num_items, world_size)
    for number in range(math.ceil(math.ceil(num_items / world_size) / batch_size)):
        indexes = mine[number * batch_size : (number + 1) * batch_size]
        yield indexes or (0,), bool(indexes)


def score_tokens(
    logits: torch.Tensor, labels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The negative log-likelihood of each token but the first, whether it is predicted (its label is not -100), and
    whether it had the highest probability. Logits [B, T, V] predict labels [B, T] one to the right."""
    targets = labels[:, 1:]
    nats = torch.zeros(targets.shape, dtype=torch.float64, device=logits.device)
    is_correct = torch.zeros(targets.shape, dtype=torch.bool, device=logits.device)
    for row, row_logits in enumerate(logits):
        for start in range(0, targets.shape[1], POSITIONS_AT_ONCE):
            place = slice(start, start + POSITIONS_AT_ONCE)
            chunk = row_logits[:-1][place].float()
            wanted = targets[row, place]
            nats[row, place] = F.cross_entropy(
                chunk, wanted, ignore_index=-100, reduction="none"
            ).double()
            is_correct[row, place] = chunk.argmax(-1) == wanted
    return nats, targets != -100, is_correct


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """No dropout and no gradients inside; afterwards each module is back in its mode."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


def document_losses(
    model: nn.Module,
    held_out: Mapping[str, HeldOutSet],
    *,
    batch_size: int,
    after_batch: AfterBatch | None = None,
) -> dict[str, DocumentLosses]:
    """Measure the model on each document of each set, over all processes; every process gets the same losses. A
    document's first token is not predicted; it is the begin token if the tokenizer adds one. Raises DataError if a set
    has no token to predict."""
    losses = {}
    device = next(model.parameters()).device
    for name, held_out_set in held_out.items():
        rows = cast(PackedRows, held_out_set.rows)
        chosen = held_out_set.chosen
        assert chosen is not None, "the set must come from `build_data`"
        sums = torch.zeros(
            3, len(chosen), dtype=torch.float64, device=device
        )  # nats, tokens, correct tokens
        # No document is empty, so no two of them begin at the same token.
        begins = torch.from_numpy(rows.documents.offsets[chosen])
        for batch in scored_batches(model, held_out_set, batch_size, after_batch):
            document = without_waiting(document_of_tokens(batch, rows, begins).contiguous(), device)
            for values, line in zip(
                (batch.nats, batch.is_predicted, batch.is_correct), sums, strict=True
            ):
                line.index_add_(
                    0, document.flatten(), (values * batch.is_predicted).flatten().double()
                )
        sum_over_processes(sums)
        nats, num_tokens, num_correct = sums.cpu().numpy()
        counts = (num_tokens.astype(np.int64), num_correct.astype(np.int64))
        hashes = rows.documents.hashes[chosen]
        num_bytes = rows.documents.num_bytes[chosen]
        losses[name] = DocumentLosses(hashes, num_bytes, nats, *counts)
    for name, found in losses.items():
        if not found.num_tokens.any():
            raise DataError(
                f"the held-out set `{name}` has only documents of fewer than two tokens, so no token can be predicted."
                " Use longer texts."
            )
    return losses


def measure_and_keep(
    model: nn.Module,
    held_out: Mapping[str, HeldOutSet],
    *,
    batch_size: int,
    run_folder: Path,
    step: int,
    after_batch: AfterBatch | None = None,
) -> dict[str, float]:
    """Save the losses of step 0 and of the last evaluation in the run's folder, for the verdict; return `{name}_loss`
    and the other metrics of `DocumentLosses` of each set."""
    losses = document_losses(model, held_out, batch_size=batch_size, after_batch=after_batch)
    if losses and is_main_process():
        try:
            save_losses(run_folder / HELD_OUT / f"step-{step}.npz", losses)
        except OSError as problem:  # on a full disk only the confidence intervals are lost
            why = f"The losses of each document at step {step} are not saved: {problem.strerror}."
            record_event(
                run_folder, "not_written", f"{why} The evaluation's metrics are logged.", step=step
            )
        with suppress(OSError):  # read-only disk; remove earlier losses even if saving failed
            for other, path in saved_losses(run_folder).items():
                if other not in (0, step):
                    path.unlink()
    return {
        f"{name}_{metric}": value
        for name, its in losses.items()
        for metric, value in its.metrics().items()
    }


def document_of_tokens(batch: ScoredBatch, rows: PackedRows, begins: torch.Tensor) -> torch.Tensor:
    """[B, T - 1]: the number of each predicted token's document in the set; undefined for padding."""
    documents = []
    is_first = batch.position_ids == 0
    for row in batch.rows:
        starts, _ = rows.packing.pieces(row, 0)
        documents.append(
            torch.searchsorted(begins, torch.from_numpy(np.array(starts)), right=True) - 1
        )
    if len(is_first) != len(
        batch.rows
    ):  # `packing: token_budget`: each sequence of a row is a piece
        return documents[0][:, None].expand(-1, is_first.shape[1] - 1)
    piece = is_first.cumsum(1) - 1
    return torch.stack(
        [of_row[piece[i].clamp(max=len(of_row) - 1)] for i, of_row in enumerate(documents)]
    )[:, 1:]


# --- callbacks: samples of the model's output, and stopping before it forgets too much ---


log = logging.getLogger("cpt")


@dataclass(frozen=True)
class Point:
    step: int
    tokens: int
    bits_per_byte: dict[str, float]  # per held-out set


class StopWhenForgetting(TrainerCallback):
    """End the training when bits per byte of a general set rise by more than the recipe allows.

    Args:
        allowed: held-out set -> the maximum rise of its bits per byte, as a share of the value before the first step
            (a resumed run reads it from metrics.jsonl); None allows any rise.
    """

    def __init__(self, run: Run, allowed: Mapping[str, float | None]) -> None:
        self.run = run
        self.allowed = {name: rise for name, rise in allowed.items() if rise is not None}
        self.before: dict[str, float] = {}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
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
                        f"{reason}. The learning rate had not decayed yet. To train longer: more replay (more weight"
                        " of general sources), a lower `optimizer.learning_rate`, or LoRA."
                    )
                self.run.write_status(
                    "running", step=state.global_step, steps=state.max_steps, stopped=reason
                )


class StopEarly(TrainerCallback, ExportableState):
    """End the training when a held-out set no longer improves; save a checkpoint at each improvement.

    Its state is in checkpoints, so that a resumed run stops at the same step. All processes have the same metrics, so
    they stop together.
    """

    def __init__(self, run: Run, rule: EarlyStop) -> None:
        self.run = run
        self.rule = rule
        self.best = math.inf
        self.best_step = 0
        self.evaluated = -1  # the last step that was evaluated
        self.stale = 0  # evaluations since the best one

    def state(self) -> dict[str, Any]:
        names = ("best", "best_step", "evaluated", "stale")
        return {"args": {}, "attributes": {name: vars(self)[name] for name in names}}

    @property
    def best_checkpoint(self) -> Path:
        return self.run.folder / f"checkpoint-{self.best_step}"

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        restore_state(self, state, type(self).__name__)
        if self.stale >= self.rule.patience:  # killed after it had stopped
            self.stop(state, control)

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        metrics = kwargs["metrics"]
        name = f"{EVALUATED}{self.rule.set}"
        value = metrics.get(f"{name}{BITS_PER_BYTE}", metrics.get(f"{name}_loss"))
        if value is None:
            raise RecipeError(
                f"`evaluation.stop.set`: the stage measures no bits per byte or loss of `{self.rule.set}`."
                f" It measures: {', '.join(metrics) or 'nothing'}. Name another set."
            )
        if state.global_step == self.evaluated:  # again, because a signal interrupted it
            return
        self.evaluated = state.global_step
        if value < self.best - self.rule.margin:
            self.best = value
            self.best_step = state.global_step
            self.stale = 0
            control.should_save = control.should_save or state.global_step > 0
            return
        self.stale += 1
        if self.stale >= self.rule.patience and state.global_step < state.max_steps:
            control.should_save = True
            self.stop(state, control)

    def stop(self, state: TrainerState, control: TrainerControl) -> None:
        control.should_training_stop = True
        step = state.global_step
        rule = self.rule
        where = "before the first step"
        if self.best_step > 0:
            where = f"at step {self.best_step}: cpt export {self.best_checkpoint} --output FOLDER"
        reason = (
            f"stopped early at step {step}: `{rule.set}` has not improved by more than {rule.margin:g} in"
            f" {self.stale} evaluation(s). The exported model has the last weights; the best value was"
            f" {self.best:.4f}, {where}"
        )
        if is_main_process():
            log.info(f"The run {reason}.")
        self.run.write_status("running", step=step, steps=state.max_steps, stopped=reason)


def restore_state(callback: Any, state: TrainerState, name: str) -> None:
    """Give a callback the attributes that it had in the checkpoint; a new run has none."""
    states: Any = state.stateful_callbacks  # annotated as a list, but a dict
    for attribute, value in (states or {}).get(name, {}).get("attributes", {}).items():
        setattr(callback, attribute, value)


def bits_per_byte_of(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {set_name(key): float(value) for key, value in metrics.items() if is_bits_per_byte(key)}


def read_evaluations(metrics: Path) -> list[Content]:
    """The lines of a metrics.jsonl that contain an evaluation."""
    lines = [line for line in read_lines(metrics) if {"step", "tokens"} <= line.keys()]
    return [line for line in lines if any(key.startswith(EVALUATED) for key in line)]


def read_course(metrics: Path) -> list[Point]:
    return course_of(read_evaluations(metrics))


def course_of(evaluations: Sequence[Content]) -> list[Point]:
    """The evaluations of held-out text, in order; the last one of a step that was evaluated twice."""
    points: dict[int, Point] = {}
    for line in evaluations:
        found = bits_per_byte_of(line)
        if found:
            points[line["step"]] = Point(line["step"], line["tokens"], found)
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
        """Sample at the start, except in a resumed run, which already has these samples."""
        if state.global_step == 0:
            self.sample(kwargs["model"], 0, control)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.sample(kwargs["model"], state.global_step, control)

    def sample(self, model: nn.Module, step: int, control: TrainerControl) -> None:
        """Generate on every process, as ZeRO-3 needs; the main one writes. On a full disk, lines wait in memory."""
        options: dict[str, Any] = {
            "max_new_tokens": self.max_new_tokens,
            "before_each": self.before_each,
        }
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
            keep_lines_until(path, step - 1)  # a run killed after its samples rewrites them
        except OSError as problem:
            record_event(
                path.parent,
                "not_written",
                f"{path.name} cannot be changed: {problem.strerror}.",
                step=step,
            )
        for prompt, continuation in zip(self.prompts, continuations, strict=True):
            sample = {"step": step, "prompt": prompt, "continuation": continuation}
            self.lines.add(json.dumps(sample, ensure_ascii=False))
        if self.lines.waiting:
            text = f"The disk is full: samples of step {step} are lost unless space is freed before the run ends."
            record_event(path.parent, "not_written", text, step=step)


def continue_prompts(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    *,
    max_new_tokens: int = 64,
    before_each: Callable[[], None] = lambda: None,
) -> list[str]:
    """Generate greedily until the document ends or `max_new_tokens` is reached; a prompt gets the begin token if the
    tokenizer adds one, as in training. Every process of the run must call it, and all get the same texts. The model
    may be wrapped by DDP or DeepSpeed; its mode, its configs and the random state are preserved."""
    # DDP and DeepSpeed engines hold the generating model as `module`.
    is_generator = isinstance(model, PreTrainedModel) or "base_model" in dict(
        model.named_children()
    )
    generator: Any = (
        model if is_generator and not isinstance(model, DistributedDataParallel) else model.module
    )
    device = next(generator.parameters()).device
    begin = [tokenizer.bos_token_id] if adds_bos(tokenizer) else []
    continuations = []
    # The model's generation config may sample or penalise, and training sets `use_cache=False`.
    before = generator.generation_config
    used_cache = generator.config.use_cache
    of_model = before.eos_token_id  # with the end of a turn, if the model learns chats
    ends = of_model if isinstance(of_model, list) else [of_model]
    ends = [token for token in dict.fromkeys((tokenizer.eos_token_id, *ends)) if token is not None]
    generator.generation_config = GenerationConfig(
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=ends,
        pad_token_id=tokenizer.pad_token_id,
        use_cache=True,
    )
    generator.config.use_cache = True
    try:
        with evaluation_mode(model):
            for prompt in prompts:
                before_each()
                ids = torch.tensor(
                    [begin + tokenizer(prompt, add_special_tokens=False)["input_ids"]],
                    device=device,
                )
                # Under ZeRO-3, generate synchronises the processes automatically (synced_gpus).
                written = generator.generate(input_ids=ids, attention_mask=torch.ones_like(ids))
                continuations.append(
                    str(tokenizer.decode(written[0, ids.shape[1] :], skip_special_tokens=True))
                )
    finally:
        generator.generation_config = before
        generator.config.use_cache = used_cache
    return continuations
