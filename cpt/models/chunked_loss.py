"""The cross entropy without all logits in memory, for every causal language model: the head is applied to some tokens at a time.

Liger's kernels do that for the architectures that they know, on a GPU; this is for the others, and for a CPU. While the model trains, its
head passes hidden states on, and its loss takes them through the head in chunks that are computed again in the backward pass. Calls go
through the head itself, so that adapters, hooks (ZeRO-3's too) and heads of a kind of their own work as ever.
"""

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss

from cpt.errors import RecipeError

# What Liger 0.8 patches (its map of model types, those of causal language models that people continue from).
LIGER_TYPES = """
    gemma gemma2 gemma3_text glm4 granite llama mistral mixtral nemotron olmo2 olmo3 phi3 qwen2 qwen3 qwen3_moe smollm3
"""
ALTERED_LOGITS = ("final_logit_softcapping", "logits_scaling", "logit_scale", "lm_head_multiplier")
IGNORED = -100
BYTES_AT_ONCE = 2**30
BYTES_FOR_EACH_LOGIT = 12  # log-softmax, its gradient and the logits' own, in fp32
FEWEST_TOKENS = 256


def is_left_to_liger(config: PreTrainedConfig, *, on_gpu: bool | None = None) -> bool:
    """Whether `use_liger_kernel` means Liger's own loss: on a GPU, for an architecture that it knows.

    Args:
        on_gpu: of the machine that is meant; by default this one.
    """
    has_gpu = torch.cuda.is_available() and importlib.util.find_spec("liger_kernel") is not None if on_gpu is None else on_gpu
    return has_gpu and config.model_type in LIGER_TYPES.split()


def tokens_at_once(vocabulary: int) -> int:
    """A power of two whose logits take about a gibibyte."""
    tokens = BYTES_AT_ONCE // (BYTES_FOR_EACH_LOGIT * vocabulary)
    return int(max(FEWEST_TOKENS, 2 ** (tokens.bit_length() - 1 if tokens else 0)))


def use_chunked_loss(model: PreTrainedModel | PeftModel, *, tokens: int | None = None) -> None:
    """Give the model this loss while it trains; evaluation and generation see logits as before.

    Args:
        tokens: through the head at once; by default those of about a gibibyte.

    Raises:
        RecipeError: the model changes its logits after its head.
    """
    whole: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    values = whole.config.get_text_config().to_dict()
    if altered := [name for name in ALTERED_LOGITS if values.get(name) not in (None, 1, 1.0)]:
        why = f"{whole.config.model_type} changes its logits after its head (`{altered[0]}`)"
        raise RecipeError(f"`training.use_liger_kernel`: {why}, so where Liger does not know it they are needed whole. Remove the key.")
    head = whole.get_output_embeddings()
    loss = ChunkedLoss(head, tokens or tokens_at_once(int(values["vocab_size"])), whole.loss_function)
    head.forward = loss.forward_of_head
    whole.loss_function = loss


class ChunkedLoss:
    """A model's loss function, and the forward of its head.

    Args:
        head: gives the logits of hidden states [..., width].
        tokens: at once.
        plain: the model's own loss function, for when it does not train.
    """

    def __init__(self, head: nn.Module, tokens: int, plain: Callable[..., torch.Tensor] = ForCausalLMLoss) -> None:
        self.head, self.tokens, self.plain = head, tokens, plain
        self.own_forward = head.forward
        self.computes = False
        self.dtype: torch.dtype | None = None
        self.is_random = any(isinstance(module, nn.Dropout) and module.p > 0 for module in head.modules())

    def forward_of_head(self, hidden: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        """The logits, or while the model trains the hidden states for `__call__`."""
        if self.head.training and not self.computes:
            self.dtype = hidden.dtype
            return hidden
        logits: torch.Tensor = self.own_forward(hidden, *arguments, **options)
        return logits

    def __call__(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,
        vocab_size: int,
        num_items_in_batch: torch.Tensor | int | None = None,
        shift_labels: torch.Tensor | None = None,
        **options: Any,
    ) -> torch.Tensor:
        """The mean cross entropy over the labels, or their sum over `num_items_in_batch`.

        Args:
            logits: hidden states while the model trains: [rows, tokens, width].
            labels: [rows, tokens]; -100 counts for nothing.
            shift_labels: the labels of the next tokens, where the caller has shifted them already.
        """
        if not self.head.training:
            return self.plain(logits, labels, vocab_size, num_items_in_batch=num_items_in_batch, shift_labels=shift_labels, **options)
        if shift_labels is None:
            shift_labels = F.pad(labels, (0, 1), value=IGNORED)[..., 1:]
        hidden = logits.reshape(-1, logits.shape[-1]).to(self.dtype)
        targets = shift_labels.reshape(-1).to(hidden.device)
        total = torch.zeros((), device=hidden.device)
        for rows, wanted in zip(hidden.split(self.tokens), targets.split(self.tokens), strict=True):
            total = total + checkpoint(self.summed, rows, wanted, use_reentrant=False, preserve_rng_state=self.is_random)
        count = num_items_in_batch if num_items_in_batch is not None else (targets != IGNORED).sum()
        return total / (count.to(total.device) if isinstance(count, torch.Tensor) else count)

    def summed(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The cross entropy of some tokens, summed."""
        self.computes = True
        try:
            logits = self.head(hidden)
        finally:
            self.computes = False
        return F.cross_entropy(logits.float(), targets, ignore_index=IGNORED, reduction="sum")
