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
from cpt.hf_internals import IGNORED
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
    position_ids: torch.Tensor  # (B, T) on the host, restarting with each piece of a document
    nats: torch.Tensor  # (B, T - 1) float64, of the next token; 0 if it is not predicted
    is_predicted: torch.Tensor  # (B, T - 1)
    is_correct: torch.Tensor  # (B, T - 1): the next token had the highest probability


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
    if held_out_set.rows[0]["input_ids"].dim() == 2:  # `packing: token_budget`: a row is a batch
        batch_size = 1
    with evaluation_mode(model), fused_scores(model) as fused:
        for numbers, are_counted in batches(len(held_out_set.rows), batch_size):
            on_host = stack_rows([held_out_set.rows[number] for number in numbers])
            batch = {key: without_waiting(values, device) for key, values in on_host.items()}
            labels = batch.pop("labels")
            scored = None if fused is None else fused.score(inner, batch, labels)
            if scored is not None:
                nats, is_correct = scored
                scores = nats[:, :-1].double(), labels[:, 1:] != IGNORED, is_correct[:, :-1]
            else:
                # With a cache or a mask, transformers would ignore the restarts of positions; packed rows have
                # no mask.
                scores = score_tokens(inner(**batch, use_cache=False).logits, labels)
            if are_counted:
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
    rank = 0
    num_processes = 1
    if has_process_group():
        rank = dist.get_rank()
        num_processes = dist.get_world_size()
    own_numbers = range(rank, num_items, num_processes)
    num_batches = math.ceil(math.ceil(num_items / num_processes) / batch_size)
    for start in range(0, num_batches * batch_size, batch_size):
        numbers = own_numbers[start : start + batch_size]
        yield numbers or (0,), bool(numbers)


def score_tokens(
    logits: torch.Tensor,  # (B, T, V)
    labels: torch.Tensor,  # (B, T)
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # each (B, T - 1)
    """The negative log-likelihood of each token but the first, whether it is predicted (its label is not -100), and
    whether it had the highest probability. Logits predict the labels one to the right."""
    targets = labels[:, 1:]
    nats = torch.zeros(targets.shape, dtype=torch.float64, device=logits.device)
    is_correct = torch.zeros(targets.shape, dtype=torch.bool, device=logits.device)
    for row, row_logits in enumerate(logits):
        for start in range(0, targets.shape[1], POSITIONS_AT_ONCE):
            positions = slice(start, start + POSITIONS_AT_ONCE)
            chunk = row_logits[:-1][positions].float()
            target = targets[row, positions]
            losses = F.cross_entropy(chunk, target, ignore_index=IGNORED, reduction="none")
            nats[row, positions] = losses.double()
            is_correct[row, positions] = chunk.argmax(-1) == target
    return nats, targets != IGNORED, is_correct


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
    for name, held_out_set in held_out.items():
        losses[name] = losses_of_set(model, held_out_set, batch_size, after_batch)
    for name, of_set in losses.items():
        if not of_set.num_tokens.any():
            raise DataError(
                f"the held-out set `{name}` has only documents of fewer than two tokens, so no token can be predicted."
                " Use longer texts."
            )
    return losses


def losses_of_set(
    model: nn.Module, held_out_set: HeldOutSet, batch_size: int, after_batch: AfterBatch | None
) -> DocumentLosses:
    rows = cast(PackedRows, held_out_set.rows)
    documents_of_set = held_out_set.chosen
    assert documents_of_set is not None, "the set must come from `build_data`"
    device = next(model.parameters()).device
    # The sums of nats, tokens and correct tokens, by document.
    sums = torch.zeros(3, len(documents_of_set), dtype=torch.float64, device=device)
    # No document is empty, so no two of them begin at the same token.
    begins = torch.from_numpy(rows.documents.offsets[documents_of_set])
    for batch in scored_batches(model, held_out_set, batch_size, after_batch):
        document = document_of_tokens(batch, rows, begins).contiguous()
        document = without_waiting(document, device).flatten()
        columns = (batch.nats, batch.is_predicted, batch.is_correct)
        for values, sums_of_column in zip(columns, sums, strict=True):
            values = (values * batch.is_predicted).flatten().double()
            sums_of_column.index_add_(0, document, values)
    sum_over_processes(sums)
    nats, num_tokens, num_correct = sums.cpu().numpy()
    return DocumentLosses(
        hashes=rows.documents.hashes[documents_of_set],
        num_bytes=rows.documents.num_bytes[documents_of_set],
        nats=nats,
        num_tokens=num_tokens.astype(np.int64),
        num_correct=num_correct.astype(np.int64),
    )


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
            reason = (
                f"The losses of each document at step {step} are not saved: {problem.strerror}."
            )
            record_event(
                run_folder,
                "not_written",
                f"{reason} The evaluation's metrics are logged.",
                step=step,
            )
        with suppress(OSError):  # read-only disk; remove earlier losses even if saving failed
            for saved_step, path in saved_losses(run_folder).items():
                if saved_step not in (0, step):
                    path.unlink()
    metrics = {}
    for name, of_set in losses.items():
        for metric, value in of_set.metrics().items():
            metrics[f"{name}_{metric}"] = value
    return metrics


def document_of_tokens(batch: ScoredBatch, rows: PackedRows, begins: torch.Tensor) -> torch.Tensor:
    """(B, T - 1): the number of each predicted token's document in the set; undefined for padding."""
    documents = []
    for starts in starts_of_pieces(batch, rows):
        documents.append(torch.searchsorted(begins, starts, right=True) - 1)
    return spread_over_tokens(batch, documents)[:, 1:]


def starts_of_pieces(batch: ScoredBatch, rows: PackedRows) -> list[torch.Tensor]:
    """For each row, the number of the first token of each piece in the source."""
    starts = [rows.packing.pieces(row, epoch=0)[0] for row in batch.rows]
    return [torch.from_numpy(np.array(of_row)) for of_row in starts]


def spread_over_tokens(batch: ScoredBatch, of_pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """(B, T): give each token the value of its piece, from the values of each row's pieces; undefined for padding."""
    if len(batch.position_ids) != len(batch.rows):
        # `packing: token_budget`: each sequence of a row is a piece.
        return of_pieces[0][:, None].expand_as(batch.position_ids)
    piece = (batch.position_ids == 0).cumsum(1) - 1
    return torch.stack(
        [of_row[piece[i].clamp(max=len(of_row) - 1)] for i, of_row in enumerate(of_pieces)]
    )


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
        self.before = {}
        if state.global_step == 0:
            return
        course = read_course(self.run.folder / METRICS)
        if course and course[0].step == 0:
            self.before = dict(course[0].bits_per_byte)

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        after = bits_per_byte_of(kwargs["metrics"])
        if not self.before:
            self.before = after
            return
        for name, allowed_rise in self.allowed.items():
            if name not in after or after[name] <= self.before[name] * (1 + allowed_rise):
                continue
            control.should_training_stop = True
            rise = after[name] / self.before[name] - 1
            reason = (
                f"stopped at step {state.global_step}: bits per byte of `{name}` rose from {self.before[name]:.4f}"
                f" to {after[name]:.4f} ({rise:+.1%}), more than the {allowed_rise:.1%} that"
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
    bits_per_byte = {}
    for key, value in metrics.items():
        if is_bits_per_byte(key):
            bits_per_byte[set_name(key)] = float(value)
    return bits_per_byte


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
        bits_per_byte = bits_per_byte_of(line)
        if bits_per_byte:
            points[line["step"]] = Point(line["step"], line["tokens"], bits_per_byte)
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
        try:
            continuations = continue_prompts(
                model,
                self.tokenizer,
                self.prompts,
                max_new_tokens=self.max_new_tokens,
                before_each=self.before_each,
            )
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
            reason = f"{path.name} cannot be changed: {problem.strerror}."
            record_event(path.parent, "not_written", reason, step=step)
        for prompt, continuation in zip(self.prompts, continuations, strict=True):
            sample = {"step": step, "prompt": prompt, "continuation": continuation}
            self.lines.add(json.dumps(sample, ensure_ascii=False))
        if self.lines.waiting:
            reason = f"The disk is full: samples of step {step} are lost unless space is freed before the run ends."
            record_event(path.parent, "not_written", reason, step=step)


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
    generator: Any = model
    has_adapter = "base_model" in dict(model.named_children())
    if not isinstance(model, PreTrainedModel) and not has_adapter:
        generator = model.module  # of DDP or a DeepSpeed engine
    device = next(generator.parameters()).device
    begin = [tokenizer.bos_token_id] if adds_bos(tokenizer) else []
    continuations = []
    # The model's generation config may sample or penalise, and training sets `use_cache=False`.
    saved_config = generator.generation_config
    used_cache = generator.config.use_cache
    generator.generation_config = GenerationConfig(
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=end_tokens(tokenizer, saved_config),
        pad_token_id=tokenizer.pad_token_id,
        use_cache=True,
    )
    generator.config.use_cache = True
    try:
        with evaluation_mode(model):
            for prompt in prompts:
                before_each()
                prompt_ids = begin + tokenizer(prompt, add_special_tokens=False)["input_ids"]
                ids = torch.tensor([prompt_ids], device=device)  # (1, T)
                # Under ZeRO-3, generate synchronises the processes automatically (synced_gpus).
                generated = generator.generate(input_ids=ids, attention_mask=torch.ones_like(ids))
                new_ids = generated[0, len(prompt_ids) :]
                continuations.append(str(tokenizer.decode(new_ids, skip_special_tokens=True)))
    finally:
        generator.generation_config = saved_config
        generator.config.use_cache = used_cache
    return continuations


def end_tokens(tokenizer: PreTrainedTokenizerBase, config: GenerationConfig) -> list[int]:
    """The tokens that end a document, and the end of a turn, if the model learns chats."""
    of_model = config.eos_token_id
    if not isinstance(of_model, list):
        of_model = [of_model]
    tokens = dict.fromkeys((tokenizer.eos_token_id, *of_model))
    return [token for token in tokens if token is not None]
