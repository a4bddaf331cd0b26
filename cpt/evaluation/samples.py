"""What the model writes: greedy continuations of a few prompts, for the eye."""

import json
from collections.abc import Iterator, Sequence
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

from cpt.data.tokenization import adds_bos
from cpt.evaluation.perplexity import evaluation_mode
from cpt.ranks import is_main_process


class PromptSamples(TrainerCallback):
    """Continue the recipe's prompts before the first and after the last step, one JSON line each: step, prompt, continuation."""

    def __init__(self, path: Path, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str], max_new_tokens: int = 64) -> None:
        self.path = path
        self.tokenizer = tokenizer
        self.prompts = prompts
        self.max_new_tokens = max_new_tokens

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """A resumed run has its first samples already."""
        if state.global_step == 0:
            self.write(kwargs["model"], step=0)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """After the last step."""
        self.write(kwargs["model"], step=state.global_step)

    def write(self, model: nn.Module, step: int) -> None:
        """Every process generates (ZeRO-3 needs all of them), the main one writes."""
        continuations = continue_prompts(model, self.tokenizer, self.prompts, max_new_tokens=self.max_new_tokens)
        if is_main_process():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("w" if step == 0 else "a", encoding="utf-8") as file:
                for prompt, continuation in zip(self.prompts, continuations, strict=True):
                    file.write(json.dumps({"step": step, "prompt": prompt, "continuation": continuation}, ensure_ascii=False) + "\n")


def continue_prompts(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str], *, max_new_tokens: int = 64
) -> list[str]:
    """The most likely next token, again and again, until the document ends or `max_new_tokens` are there.

    Every process of the run must call it, and all get the same texts. The model's mode, its configs and the random state are left as
    they were.

    Args:
        model: plain, a PeftModel, or wrapped by DDP or DeepSpeed.
        prompts: beginnings of documents: the begin token is put before each where the tokenizer adds one, as in training.
    """
    generator = unwrapped(model)
    device = next(generator.parameters()).device
    continuations = []
    with evaluation_mode(model), plain_greedy(generator, tokenizer, max_new_tokens):
        for prompt in prompts:
            begin = [tokenizer.bos_token_id] if adds_bos(tokenizer) else []
            ids = torch.tensor([begin + tokenizer(prompt, add_special_tokens=False)["input_ids"]], device=device)
            # Under ZeRO-3 generate keeps the processes in step by itself (synced_gpus).
            written = generator.generate(input_ids=ids, attention_mask=torch.ones_like(ids))
            continuations.append(str(tokenizer.decode(written[0, ids.shape[1] :], skip_special_tokens=True)))
    return continuations


def unwrapped(model: nn.Module) -> Any:
    """The module that has `generate`: inside DDP or a DeepSpeed engine, both of which keep it as `module`."""
    is_generator = isinstance(model, PreTrainedModel) or "base_model" in dict(model.named_children())
    return model if is_generator and not isinstance(model, DistributedDataParallel) else model.module


@contextmanager
def plain_greedy(model: Any, tokenizer: PreTrainedTokenizerBase, max_new_tokens: int) -> Iterator[None]:
    """Set aside what the model's own generation config adds (sampling, penalties) and the training's `use_cache=False`."""
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
