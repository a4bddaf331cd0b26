"""Samples: greedy continuations of a few prompts before and after the training."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
from cpt.errors import Interrupted
from cpt.evaluation.perplexity import evaluation_mode
from cpt.files import LinesFile
from cpt.ranks import is_main_process
from cpt.runs.events import record_event
from cpt.runs.folder import keep_lines_until


class PromptSamples(TrainerCallback):
    """Continue the recipe's prompts before the first and after the last step, one JSON line each: step, prompt,
    continuation.

    Args:
        before_each: called before each prompt; it raises Interrupted on all processes to stop.
    """

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
        """Every process generates, as ZeRO-3 needs; the main one writes."""
        try:
            texts = continue_prompts(
                model, self.tokenizer, self.prompts, max_new_tokens=self.max_new_tokens, before_each=self.before_each
            )
        except Interrupted:
            control.should_training_stop = True
            return
        if is_main_process():
            self.write(step, texts)

    def write(self, step: int, continuations: Sequence[str]) -> None:
        """Replace the samples of a run that was killed after them; on a full disk they wait in memory."""
        path = self.lines.path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            keep_lines_until(path, step - 1)
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
    """Generate greedily until the document ends or `max_new_tokens` are reached.

    Every process of the run must call it, and all get the same texts. The model's mode, its configs and the random
    state do not change.

    Args:
        model: plain, a PeftModel, or wrapped by DDP or DeepSpeed.
        prompts: beginnings of documents. They get the begin token if the tokenizer adds one, as in training.
        before_each: called before each of them.
    """
    generator = unwrapped(model)
    device = next(generator.parameters()).device
    continuations = []
    with evaluation_mode(model), plain_greedy(generator, tokenizer, max_new_tokens):
        for prompt in prompts:
            before_each()
            begin = [tokenizer.bos_token_id] if adds_bos(tokenizer) else []
            ids = torch.tensor([begin + tokenizer(prompt, add_special_tokens=False)["input_ids"]], device=device)
            # Under ZeRO-3 generate keeps the processes in step by itself (synced_gpus).
            written = generator.generate(input_ids=ids, attention_mask=torch.ones_like(ids))
            continuations.append(str(tokenizer.decode(written[0, ids.shape[1] :], skip_special_tokens=True)))
    return continuations


def unwrapped(model: nn.Module) -> Any:
    """The module that has `generate`: DDP and a DeepSpeed engine keep it as `module`."""
    is_generator = isinstance(model, PreTrainedModel) or "base_model" in dict(model.named_children())
    return model if is_generator and not isinstance(model, DistributedDataParallel) else model.module


@contextmanager
def plain_greedy(model: Any, tokenizer: PreTrainedTokenizerBase, max_new_tokens: int) -> Iterator[None]:
    """Replace the model's own generation config (sampling, penalties) and the training's `use_cache=False` for a
    while."""
    before, used_cache = model.generation_config, model.config.use_cache
    model.generation_config = GenerationConfig(
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        use_cache=True,
    )
    model.config.use_cache = True
    try:
        yield
    finally:
        model.generation_config, model.config.use_cache = before, used_cache
