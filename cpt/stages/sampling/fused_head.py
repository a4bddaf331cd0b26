"""What TRL's fused head does not know of our own families: rows of a vocabulary that are no tokens, and how experts
are balanced.

TRL multiplies hidden states with the head's weight by itself, and counts a mixture's balance as Mixtral does.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from transformers.integrations import is_deepspeed_zero3_enabled

from cpt.errors import RecipeError
from cpt.models.families import CptGPT2ForCausalLM
from cpt.models.minimind import BalancedForCausalLM, MiniMind2MoEForCausalLM


def fit_fused_head(model: nn.Module) -> None:
    """Let log-probabilities and the balance loss be the family's own; to be called after TRL's `add_fused_lm_head`.

    Raises:
        RecipeError: the head is divided over processes, and a part of its rows cannot be taken.
    """
    bare: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    if "forward" not in vars(bare) or not isinstance(bare, CptGPT2ForCausalLM | BalancedForCausalLM):
        return  # TRL has not put its own in front, or knows all there is to know
    if isinstance(bare, CptGPT2ForCausalLM) and is_deepspeed_zero3_enabled():
        raise RecipeError(
            "`training.deepspeed`: ZeRO-3 divides the padded head of `cpt-gpt2`, which this stage reads whole. Take"
            " ZeRO-2."
        )
    fused = bare.forward

    @functools.wraps(fused)
    def forward(*arguments: Any, fused_lm_head: bool = False, **options: Any) -> Any:
        if not fused_lm_head:
            return fused(*arguments, **options)
        if isinstance(bare, CptGPT2ForCausalLM):
            with only_tokens(bare):
                return fused(*arguments, fused_lm_head=True, **options)
        with noted_routing(bare) as noted:
            output = fused(*arguments, fused_lm_head=True, **options)
        if output.aux_loss is not None:
            output.aux_loss = balance_of_tokens(
                bare, noted[-1], options.get("attention_mask"), len(options["input_ids"])
            )
        return output

    bare.forward = forward


@contextmanager
def only_tokens(model: Any) -> Iterator[None]:
    """While it is open, the head that is shown has no rows but those of tokens."""
    head = model.lm_head
    model.get_output_embeddings = lambda: SimpleNamespace(
        weight=head.weight[: model.config.unpadded_vocab_size], bias=None
    )
    try:
        yield
    finally:
        del model.get_output_embeddings


@contextmanager
def noted_routing(model: Any) -> Iterator[list[tuple[torch.Tensor, ...]]]:
    """What the routers of all layers said, [B x T, E] each, where it was asked for."""
    noted: list[tuple[torch.Tensor, ...]] = []
    handle = model.base_model.register_forward_hook(lambda _, __, output: noted.append(output.get("router_logits")))
    try:
        yield noted
    finally:
        handle.remove()


def balance_of_tokens(
    model: BalancedForCausalLM, router_logits: tuple[torch.Tensor, ...], mask: torch.Tensor | None, rows: int
) -> torch.Tensor:
    """The family's own balance loss, of tokens that are no padding: within each row, or over all of them."""
    if mask is None:
        return model.balance(router_logits, num_sequences=rows)
    if not isinstance(model, MiniMind2MoEForCausalLM):
        return model.balance(tuple(logits[mask.bool().reshape(-1)] for logits in router_logits), num_sequences=1)
    by_row = [
        model.balance(
            tuple(logits.view(rows, -1, logits.size(-1))[row][kept] for logits in router_logits), num_sequences=1
        )
        for row, kept in enumerate(mask.bool())
    ]
    return torch.stack(by_row).mean()
