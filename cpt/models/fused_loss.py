"""The cross entropy of a causal language model without materializing all logits, for every architecture.

The head is applied to some thousand tokens at a time, and one kernel replaces their logits in place by the gradient
of the loss. All gradients are computed in the forward pass; the head's accumulate in fp32. Why not a library: torch's
`linear_cross_entropy` is not in torch 2.11 and needs another pass over the head's gradient, Liger (0.8.5) waits for
the GPU twice per micro-batch and does not support GPT-2, Nemotron-H and MiniMind, and cut-cross-entropy (25.1)
computes the logits again in the backward pass.
"""

import inspect
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from accelerate.utils import extract_model_from_parallel
from peft import PeftModel
from peft.utils import ModulesToSaveWrapper
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedConfig, PreTrainedModel, TrainingArguments

from cpt.distributed import print_once, report_fallback
from cpt.errors import RecipeError
from cpt.hardware import triton_failure
from cpt.hf_internals import IGNORED
from cpt.models.families import PaddedVocabularyHead
from cpt.torch_internals import compiled_call, set_compiled_call, uncompiled_call

# Shapes: B rows, T tokens in a row, N tokens of all rows, D width of hidden states, V vocabulary.
LIGER_WITHOUT_LOSS = {"fused_linear_cross_entropy": False, "cross_entropy": False}
FACTORS = ("logit_scale", "lm_head_multiplier", "output_multiplier", "logits_scaling")
LOGIT_BYTES_AT_ONCE = 2 * 2**30  # of a chunk, in half precision
MOST_TOKENS = 8192
FEWEST_TOKENS = 256
# Logits in a row of the buffer are a multiple of it: rows of an odd vocabulary (GPT-2: 50,257) are aligned.
PADDED_TO = 64
ROWS_ON_CPU = 64  # rows with fp32 copies at once, on a CPU or without Triton
SCORED_POSITIONS = 1024  # per chunk in evaluation: 1 GiB in fp32 for a vocabulary of 256k
# Names in configs of: logits become cap * tanh(logits / cap)
SOFT_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
PADDED_VOCABULARY = "unpadded_vocab_size"  # logits past it are cut or masked
PENALTIES = ("router_aux_loss_coef", "aux_loss_coef", "z_loss_coefficient")
"""Weights of what models add to the cross entropy: the balance of experts (first two), and Bamba's z-loss."""
LARGEST_PROBE = 100.0  # no model caps its logits above it


def tokens_at_once(vocabulary: int) -> int:
    """Return the power of two of tokens whose logits take at most 2 GiB in half precision."""
    tokens = LOGIT_BYTES_AT_ONCE // (2 * vocabulary)
    tokens = max(FEWEST_TOKENS, min(MOST_TOKENS, tokens))  # both limits are powers of two
    return 2 ** (tokens.bit_length() - 1)


def chunk_of(tokens: int, vocabulary: int, width: int, *, accumulates: bool) -> int:
    """Return the number of tokens per chunk. If the head's gradient accumulates in half precision, several chunks need
    an fp32 sum (4 bytes per weight): one chunk (2 bytes per logit) is better if it takes no more memory."""
    chunk = tokens_at_once(vocabulary)
    if accumulates and tokens <= chunk + 2 * width:
        return tokens
    return min(tokens, chunk)


def has_kernel(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda and not triton_failure()


@torch.library.custom_op("cpt::cross_entropy_in_place", mutates_args=("logits",))
def cross_entropy_in_place(
    logits: torch.Tensor,  # (N, V)
    targets: torch.Tensor,  # (N,)
    scale: torch.Tensor,
    cap: float,
    gradient: bool,
) -> torch.Tensor:
    """Return the cross entropy of each token in fp32, [N]; 0 if its target is -100.

    Other targets outside the vocabulary have NaN as their loss and gradient, which the loss guard stops.

    Args:
        logits: replaced by their gradient times `scale` if `gradient`, else unchanged. Logits of -inf
            are masked: their gradient is 0.
        scale: fp32, one number.
        cap: soft cap of the logits; 0 for none.
    """
    if has_kernel(logits):
        from cpt.models.fused_loss_kernel import launch  # only torch's CUDA builds include Triton

        return launch(logits, targets, scale, cap, gradient, ignored=IGNORED, padding=PADDED_TO)
    losses = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    for start in range(0, len(logits), ROWS_ON_CPU):
        rows = slice(start, start + ROWS_ON_CPU)
        capped = logits[rows].float()  # (R, V), R rows at once
        if cap:
            capped = cap * torch.tanh(capped / cap)
        target = targets[rows].unsqueeze(1)  # (R, 1)
        is_ignored = target == IGNORED
        is_in_vocabulary = (target >= 0) & (target < logits.shape[1])
        index = target.where(is_in_vocabulary, 0)
        normalizer = capped.logsumexp(1, keepdim=True).where(is_in_vocabulary, math.nan)
        row_losses = (normalizer - capped.gather(1, index)).masked_fill_(is_ignored, 0)
        losses[rows] = row_losses.squeeze(1)
        if gradient:
            # The gradient of the cross entropy is softmax(logits) - one_hot(target).
            slopes = (capped - normalizer).exp_()
            slopes.scatter_add_(1, index, torch.full_like(index, -1, dtype=slopes.dtype))
            slopes.mul_(scale)
            if cap:
                slopes.mul_(1 - (capped / cap) ** 2)  # derivative of the cap
            logits[rows] = slopes.masked_fill_(is_ignored, 0)
    return losses


@cross_entropy_in_place.register_fake
def _(
    logits: torch.Tensor, targets: torch.Tensor, scale: torch.Tensor, cap: float, gradient: bool
) -> torch.Tensor:
    return logits.new_empty(len(logits), dtype=torch.float32)


@torch.library.custom_op("cpt::add_product", mutates_args=("total",))
def add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Add left^T @ right to fp32 `total` in place, without rounding the product to half precision."""
    if left.dtype == torch.float32:
        total.addmm_(left.t(), right)
    elif total.is_cuda:
        torch.addmm(total, left.t(), right, out_dtype=torch.float32, out=total)
    else:
        for left_rows, right_rows in zip(
            left.split(ROWS_ON_CPU), right.split(ROWS_ON_CPU), strict=True
        ):
            total.addmm_(left_rows.t().float(), right_rows.float())


@add_product.register_fake
def _(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    return None


class LinearCrossEntropy(torch.autograd.Function):
    """`scale` times the summed cross entropy of a linear head's logits; all gradients come from the forward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,  # (N, D)
        weight: torch.Tensor,  # (V, D)
        bias: torch.Tensor | None,  # (V,)
        targets: torch.Tensor,  # (N,)
        scale: torch.Tensor,
        cap: float,
        chunk: int | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss, in fp32, and the unscaled cross entropy of each token, [N].

        Args:
            scale: fp32, one number: 1 over the tokens of the step.
            cap: soft cap of the logits; 0 for none.
            chunk: tokens per chunk; None for `chunk_of`.
        """
        device_type = hidden.device.type
        dtype = weight.dtype
        if torch.is_autocast_enabled(device_type):
            dtype = torch.get_autocast_dtype(device_type)
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        # fp16 gradients would underflow before the division; bf16 has fp32's exponent range.
        scales_later = dtype == torch.float16
        gradient_scale = torch.ones_like(scale) if scales_later else scale
        with torch.autocast(device_type, enabled=False):
            inputs = hidden.to(dtype)
            head = weight.to(dtype)
            if chunk is None:
                in_half = needs_weight and weight.dtype != torch.float32
                chunk = chunk_of(len(inputs), *head.shape, accumulates=in_half)
            grad_hidden = torch.empty_like(inputs) if needs_hidden else None
            grad_weight = None
            # With one chunk, its product is the gradient; several need a sum.
            if needs_weight and (chunk < len(inputs) or weight.dtype != dtype):
                grad_weight = torch.zeros_like(head, dtype=torch.float32)
            grad_bias = None
            if needs_bias and bias is not None:
                grad_bias = torch.zeros_like(bias, dtype=torch.float32)
            losses = torch.empty(len(inputs), dtype=torch.float32, device=inputs.device)
            buffer = logit_buffer(inputs, head, chunk)
            for start in range(0, len(inputs), chunk):
                tokens = slice(start, start + chunk)
                part = inputs[tokens]
                logits = torch.mm(part, head.t(), out=buffer[: len(part)])
                if bias is not None:
                    logits += bias
                losses[tokens] = cross_entropy_in_place(
                    logits, targets[tokens], gradient_scale, cap, any(ctx.needs_input_grad)
                )
                # From here on `logits` are their gradients.
                if grad_hidden is not None:
                    torch.mm(logits, head, out=grad_hidden[tokens])
                if grad_weight is not None:
                    add_product(grad_weight, logits, part)
                elif needs_weight:
                    grad_weight = logits.t() @ part
                if grad_bias is not None:
                    grad_bias += logits.sum(0, dtype=torch.float32)
        ctx.mark_non_differentiable(losses)
        ctx.gradients = grad_hidden, grad_weight, grad_bias
        ctx.dtypes = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
        ctx.later_scale = scale if scales_later else None
        return losses.sum() * scale, losses

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, _: torch.Tensor) -> Any:  # type: ignore[override]
        if ctx.gradients is None:
            raise RuntimeError(
                "the fused loss supports only one backward pass. Compute the loss again."
            )
        gradients = ctx.gradients
        ctx.gradients = None
        factor = gradient if ctx.later_scale is None else gradient * ctx.later_scale
        grad_hidden, grad_weight, grad_bias = map(
            partial(scaled_in_place, factor), gradients, ctx.dtypes
        )
        return grad_hidden, grad_weight, grad_bias, None, None, None, None


def logit_buffer(inputs: torch.Tensor, head: torch.Tensor, chunk: int) -> torch.Tensor:
    """Return uninitialized memory for the logits of a chunk, [chunk, V], with aligned rows for the kernel."""
    vocabulary = len(head)
    width = vocabulary
    # The kernel zeroes the padding; torch's products on a CPU would read it, so there is none without it.
    if has_kernel(inputs):
        width = -(-vocabulary // PADDED_TO) * PADDED_TO
    return inputs.new_empty(min(chunk, len(inputs)), width)[:, :vocabulary]


def scaled_in_place(
    factor: torch.Tensor, gradient: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor | None:
    if gradient is None:
        return None
    return gradient.mul_(factor).to(dtype)


class CrossEntropyMemory:
    """The last cross entropy in training of a model that adds penalties to it, before it adds them."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.has_penalties = any(penalty_of(model, name) for name in PENALTIES)
        self.last: torch.Tensor | None = None

    def remember(self, loss: torch.Tensor) -> torch.Tensor:
        if self.has_penalties:
            self.last = loss.clone()  # models add in place
        return loss

    def take(self) -> torch.Tensor | None:
        """Return it once, because it keeps the forward pass in memory."""
        last = self.last
        self.last = None
        return last


def penalty_of(model: PreTrainedModel, name: str) -> float:
    """Return the weight of a penalty. DBRX has it in the model only, others in the config only."""
    weight = model.config.get_text_config().to_dict().get(name)
    if weight is None:
        weight = vars(model).get(name)
    return float(weight or 0)


def balance_weight(model: PreTrainedModel | PeftModel) -> float:
    """Return the weight of the loss that balances experts."""
    base = without_adapter(model)
    return penalty_of(base, PENALTIES[0]) or penalty_of(base, PENALTIES[1])


def without_adapter(model: nn.Module) -> Any:
    if isinstance(model, PeftModel):
        return model.get_base_model()
    return model


class OwnLoss:
    """The model's own loss function, with label smoothing if requested.

    transformers smooths labels outside of the model: it shifts them only for its own families without FSDP2, and
    counts the logits that a padded vocabulary masks. Here they are as the model's own loss has them.
    """

    def __init__(self, model: PreTrainedModel | PeftModel, smoothing: float = 0.0) -> None:
        base = without_adapter(model)
        self.model = base
        self.original_loss = base.loss_function
        self.smoothing = smoothing
        self.memory = CrossEntropyMemory(base)
        base.loss_function = self

    def __call__(
        self,
        logits: torch.Tensor,  # (B, T, V)
        labels: torch.Tensor,  # (B, T)
        vocab_size: int,
        num_items_in_batch: torch.Tensor | int | None = None,
        shift_labels: torch.Tensor | None = None,
        **options: Any,
    ) -> torch.Tensor:
        if self.model.training and self.smoothing:
            targets = next_tokens(labels) if shift_labels is None else shift_labels
            loss = self.smoothed(logits, targets, num_items_in_batch)
        else:
            loss = self.original_loss(
                logits,
                labels,
                vocab_size,
                num_items_in_batch=num_items_in_batch,
                shift_labels=shift_labels,
                **options,
            )
        if self.model.training:
            return self.memory.remember(loss)
        return loss

    def smoothed(
        self,
        logits: torch.Tensor,
        targets: torch.Tensor,
        num_items_in_batch: torch.Tensor | int | None,
    ) -> torch.Tensor:
        targets = targets.reshape(-1).to(logits.device)
        vocabulary = self.model.config.to_dict().get(PADDED_VOCABULARY)
        summed = F.cross_entropy(
            logits[..., :vocabulary].flatten(0, -2).float(),
            targets,
            ignore_index=IGNORED,
            reduction="sum",
            label_smoothing=self.smoothing,
        )
        if num_items_in_batch is None:
            return summed / (targets != IGNORED).sum()
        return summed / num_items_in_batch


class FusedLoss:
    """A model's loss function, and the forward of its head, which passes hidden states to the loss.

    Everything that needs the head's weights runs inside one call of the head, where the hooks of ZeRO-3, FSDP and
    adapters have prepared them. A head that is not just a linear layer (an adapter on it, quantized weights) is called
    on chunks that are recomputed in the backward pass.

    The model's own call of the head uses no weights and runs no hook. With two calls, FSDP2 would gather
    the head's group of modules twice, and reduce it before a shared weight has its whole gradient
    (pytorch#180428).
    """

    def __init__(self, model: PreTrainedModel | PeftModel, *, tokens: int | None = None) -> None:
        base = without_adapter(model)
        self.model = base
        self.called_head: Any = base.get_output_embeddings()
        """The module that the model calls: the head, or peft's wrapper around its trained copy."""
        self.head: Any = self.called_head
        if isinstance(self.called_head, ModulesToSaveWrapper):
            self.head = self.called_head.modules_to_save[self.called_head.active_adapters[0]]
        # Read here: FSDP2 will change the head's class.
        self.is_linear = type(self.head) in (nn.Linear, PaddedVocabularyHead)
        self.chunk = tokens
        self.original_loss = base.loss_function
        self.original_forward = self.head.forward
        self.original_call = compiled_call(self.called_head)
        self.has_dropout = any(
            isinstance(module, nn.Dropout) and module.p > 0 for module in self.head.modules()
        )
        self.is_scorable: bool | None = None
        """Whether the model only applies `factor` and `cap` to its logits; None before the first `score`."""
        self.memory = CrossEntropyMemory(base)
        config: PreTrainedConfig = base.config.get_text_config()
        self.factor = logit_factor(config)
        self.cap = logit_cap(config)
        self.vocabulary: int | None = config.to_dict().get(PADDED_VOCABULARY)
        """Number of logits that count, if the vocabulary is padded."""
        self.masks_padding = isinstance(self.head, PaddedVocabularyHead)
        """Whether the head masks the other logits; otherwise the model cuts them off."""
        self.hidden: torch.Tensor | None = None
        """The head's input, until the loss is called. The forward pass may return it in another dtype, or times a
        factor of the logits, which the loss applies itself; with a cap the returned value is not used."""
        self.token_losses: torch.Tensor | None = None
        """[B, T] of the last micro-batch, fp32: each position's loss of the next token."""
        self.install()

    def install(self) -> None:
        self.head.forward = self.forward_of_head
        self.model.loss_function = self
        set_compiled_call(self.called_head, self.call_of_head)

    def remove(self) -> None:
        self.head.forward = self.original_forward
        self.model.loss_function = self.original_loss
        set_compiled_call(self.called_head, self.original_call)

    def call_of_head(self, hidden: torch.Tensor, *targets_and_scale: torch.Tensor) -> Any:
        """Call the head with its hooks, or without them if it only passes hidden states through."""
        if self.head.training and not targets_and_scale:
            return self.forward_of_head(hidden)
        return uncompiled_call(self.called_head)(hidden, *targets_and_scale)

    def forward_of_head(
        self,
        hidden: torch.Tensor,
        targets: torch.Tensor | None = None,
        scale: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Return hidden states in training, else logits; with targets their loss."""
        if targets is None:
            if not self.head.training:
                return self.original_forward(hidden)
            self.hidden = hidden
            if self.changes_values:
                return hidden[..., :1]
            return hidden
        assert scale is not None, "passed with the targets"
        if self.is_linear:
            return self.loss_of_linear_head(hidden, targets, scale)
        chunk = self.chunk
        if chunk is None:
            chunk = tokens_at_once(self.head.get_parameter("weight").shape[0])
        chunks = []
        for part, part_targets in zip(hidden.split(chunk), targets.split(chunk), strict=True):
            part_losses = checkpoint(
                self.chunk_losses,
                part,
                part_targets,
                use_reentrant=False,
                preserve_rng_state=self.has_dropout,
            )
            chunks.append(part_losses)
        losses = torch.cat(chunks)
        return losses.sum() * scale, losses.detach()

    def loss_of_linear_head(
        self, hidden: torch.Tensor, targets: torch.Tensor, scale: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        weight = self.head.weight
        bias = self.head.bias
        if self.vocabulary is not None:
            weight = weight[: self.vocabulary]
        if self.vocabulary is not None and bias is not None:
            bias = bias[: self.vocabulary]
        fused: tuple[torch.Tensor, torch.Tensor] = LinearCrossEntropy.apply(
            hidden, weight, bias, targets, scale, self.cap, self.chunk
        )
        return fused

    def chunk_losses(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = self.capped(self.original_forward(hidden)[..., : self.vocabulary].float())
        return F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="none")

    def score(
        self, forward: Callable[..., Any], batch: Mapping[str, Any], labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return each next token's cross entropy in nats, and whether it was the most likely, both [B, T].

        The head is called once, in the model's forward pass, where ZeRO-3 expects it. None for a model that changes
        its logits after the head in an unknown way: instead of logits it gets numbers from -100 to 100, one for each
        token of the vocabulary, and must return them times `factor` and capped, whatever the size of its real logits.
        """
        if self.is_scorable is False:
            return None
        scores = HeadScores(self, labels)
        forward_before = self.head.forward
        self.head.forward = scores.add
        try:
            output = forward(**batch, use_cache=False)
        finally:
            self.head.forward = forward_before
        if self.is_scorable is None:
            self.is_scorable = self.returns_probe(scores.probe, output.logits.float())
            if not self.is_scorable:
                print_once(
                    f"Held-out text is scored from all logits: {type(self.model).__name__} changes them after its"
                    " head."
                )
        if not self.is_scorable:
            return None
        losses = torch.cat(scores.losses).view(labels.shape)
        is_correct = torch.cat(scores.is_correct).view(labels.shape)
        return losses, is_correct

    def returns_probe(self, probe: torch.Tensor, returned: torch.Tensor) -> bool:
        expected = self.capped(self.factor * probe.float())
        if not self.masks_padding:
            expected = expected[: self.vocabulary]
        return returned.shape[-1] == len(expected) and torch.allclose(
            returned, expected.expand_as(returned), rtol=0.02, atol=1e-4
        )

    @property
    def changes_values(self) -> bool:
        """Whether the model's own operations on its logits have no meaning for hidden states."""
        return bool(self.cap) or self.vocabulary is not None

    def multiplied(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return hidden states times the factor that the model applies to its logits."""
        if self.factor == 1:
            return hidden
        return hidden * self.factor

    def capped(self, logits: torch.Tensor) -> torch.Tensor:
        if self.cap:
            return self.cap * torch.tanh(logits / self.cap)
        return logits

    def __call__(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,  # (B, T)
        vocab_size: int,
        num_items_in_batch: torch.Tensor | int | None = None,
        shift_labels: torch.Tensor | None = None,
        **options: Any,
    ) -> torch.Tensor:
        """Return the mean cross entropy over the labels, or their sum over `num_items_in_batch`. In training, `logits`
        are hidden states, [B, T, D]."""
        if not self.head.training:
            return self.original_loss(
                logits,
                labels,
                vocab_size,
                num_items_in_batch=num_items_in_batch,
                shift_labels=shift_labels,
                **options,
            )
        if shift_labels is None:
            shift_labels = next_tokens(labels)
        assert self.hidden is not None, "the head is called before the loss"
        hidden = logits.to(self.hidden.dtype)
        if self.changes_values:  # `logits` are a column that only passed through the model
            hidden = self.multiplied(self.hidden)
        self.hidden = None
        hidden = hidden.reshape(-1, hidden.shape[-1])  # (N, D)
        targets = shift_labels.reshape(-1).to(hidden.device)  # (N,)
        num_targets = num_items_in_batch
        if num_targets is None:
            num_targets = (targets != IGNORED).sum()
        if not isinstance(num_targets, torch.Tensor):
            num_targets = hidden.new_full((), num_targets, dtype=torch.float32)
        scale = 1 / num_targets.to(hidden.device, torch.float32)
        loss, losses = self.called_head(hidden, targets, scale)
        self.token_losses = losses.view(shift_labels.shape)
        return self.memory.remember(loss)


class HeadScores:
    """Replaces a head's forward in one evaluation pass: scores hidden states and returns probe numbers for logits."""

    def __init__(self, fused_loss: FusedLoss, labels: torch.Tensor) -> None:
        self.fused_loss = fused_loss
        self.labels = labels
        self.losses: list[torch.Tensor] = []
        self.is_correct: list[torch.Tensor] = []
        self.probe = torch.empty(0)

    def add(self, hidden: torch.Tensor) -> torch.Tensor:
        fused_loss = self.fused_loss
        scale = torch.ones((), device=hidden.device)
        inputs = fused_loss.multiplied(hidden).reshape(-1, hidden.shape[-1])  # (N, D)
        targets = next_tokens(self.labels).reshape(-1).to(hidden.device)  # (N,)
        for part, part_targets in zip(
            inputs.split(SCORED_POSITIONS), targets.split(SCORED_POSITIONS), strict=True
        ):
            head_logits = fused_loss.original_forward(part)
            logits = head_logits[..., : fused_loss.vocabulary].contiguous()
            losses = cross_entropy_in_place(logits, part_targets, scale, fused_loss.cap, False)
            self.losses.append(losses)
            self.is_correct.append(logits.argmax(-1) == part_targets)
        width = head_logits.shape[-1]
        self.probe = torch.linspace(-LARGEST_PROBE, LARGEST_PROBE, width).to(hidden)
        return self.probe.repeat(*hidden[..., :1, 0].shape, 1)


def logit_factor(config: PreTrainedConfig) -> float:
    """Return the number by which the model multiplies its logits after the head."""
    values = config.to_dict()
    if values.get("logits_scaling") and config.model_type != "hyperclovax":  # a divisor
        return 1 / float(values["logits_scaling"])
    for name in FACTORS:
        if values.get(name) is not None:
            return float(values[name])
    return 1.0


def logit_cap(config: PreTrainedConfig) -> float:
    """Return the soft cap of the model's logits; 0 for none."""
    values = config.to_dict()
    for name in SOFT_CAPS:
        if values.get(name):
            return float(values[name])
    return 0.0


@contextmanager
def whole_logits(model: nn.Module) -> Iterator[None]:
    """Let the model compute its own loss, from all logits."""
    fused = installed_loss(model)
    assert fused is not None, "called for a model with a fused loss"
    fused.remove()
    try:
        yield
    finally:
        fused.install()


def installed_loss(model: nn.Module) -> FusedLoss | None:
    inner: Any = extract_model_from_parallel(model)
    loss = getattr(without_adapter(inner), "loss_function", None)
    if isinstance(loss, FusedLoss):
        return loss
    return None


def next_tokens(labels: torch.Tensor) -> torch.Tensor:
    return F.pad(labels, (0, 1), value=IGNORED)[..., 1:]


def why_not_replaced(model: PreTrainedModel | PeftModel) -> str | None:
    """Return why the loss function cannot be replaced; None if it can."""
    base = without_adapter(model)
    if "loss_function" not in inspect.unwrap(type(base).forward).__code__.co_names:
        return f"{type(base).__name__} does not compute its loss by `self.loss_function`"
    return None


def why_not_fused(model: PreTrainedModel | PeftModel) -> str | None:
    """Return why the loss cannot be computed in chunks; None if it can."""
    base = without_adapter(model)
    if not hasattr(base, "get_output_embeddings") or base.get_output_embeddings() is None:
        return f"{type(base).__name__} does not define its head (`get_output_embeddings`)"
    if penalty_of(base, "z_loss_coefficient"):
        return f"the z-loss of {type(base).__name__} needs all logits"
    return why_not_replaced(model)


@contextmanager
def fused_scores(model: nn.Module) -> Iterator[FusedLoss | None]:
    """Score batches by chunks of positions; None for a model that needs all logits."""
    inner: Any = extract_model_from_parallel(model)
    installed = installed_loss(inner)
    if installed is not None:
        yield installed
    elif why_not_fused(inner) is not None:
        yield None
    else:
        fused = FusedLoss(inner)
        try:
            yield fused
        finally:
            fused.remove()


def keep_liger_to_layers(training: TrainingArguments) -> None:
    """Use only Liger's layer kernels, on a GPU: its loss waits for the GPU and rounds the head's gradients."""
    if training.use_liger_kernel:
        training.use_liger_kernel = training.device.type == "cuda"
        if not training.use_liger_kernel:
            print_once("`training.use_liger_kernel` has no effect on a CPU.")
        training.liger_kernel_config = LIGER_WITHOUT_LOSS | dict(training.liger_kernel_config or {})


def set_up_loss(
    model: nn.Module, fused_loss: bool | Literal["auto"], training: TrainingArguments
) -> FusedLoss | OwnLoss | None:
    """Replace the model's loss function; return the new one, or None for a model without one."""
    if not isinstance(model, PreTrainedModel | PeftModel):
        return None
    refuse_unshifted_labels(model)
    on_gpu = training.device.type == "cuda"
    reason = why_not_fused(model)
    if training.label_smoothing_factor:
        check_smoothing(model, training)
        reason = "`training.label_smoothing_factor` needs all logits"
    if fused_loss is True and reason is not None:
        raise RecipeError(f"model.fused_loss: {reason}. Remove the key.")
    if fused_loss is True or fused_loss == "auto" and on_gpu and reason is None:
        # The hidden states that pass through the head are a view; no model changes them in place.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
        if on_gpu and triton_failure():
            report_fallback("model.fused_loss", "chunks by torch's operations", triton_failure())
        return FusedLoss(model)
    if on_gpu:
        print_once(
            f"The loss is computed from all logits: {reason or '`model.fused_loss: false`'}."
        )
    return set_up_own_loss(model, training)


def set_up_own_loss(model: nn.Module, training: TrainingArguments) -> OwnLoss | None:
    """Replace the model's loss function by itself with label smoothing; None if it has no such function."""
    if not isinstance(model, PreTrainedModel | PeftModel) or why_not_replaced(model) is not None:
        return None
    return OwnLoss(model, training.label_smoothing_factor)


def refuse_unshifted_labels(model: PreTrainedModel | PeftModel) -> None:
    """Refuse families of transformers whose loss compares logits with the labels of the same position."""
    model_class = type(without_adapter(model))
    is_of_transformers = model_class.__module__.startswith("transformers.")
    if is_of_transformers and why_not_replaced(model) is not None:
        raise RecipeError(
            f"model: {model_class.__name__} does not shift labels, so it would learn to repeat its input. Use a"
            " decoder-only architecture, such as llama or qwen3."
        )


def check_smoothing(model: PreTrainedModel | PeftModel, training: TrainingArguments) -> None:
    """Raise RecipeError if labels of the model cannot be smoothed."""
    reason = why_not_replaced(model)
    liger: Mapping[str, Any] = dict(training.liger_kernel_config or {})
    if training.use_liger_kernel and any(liger[name] for name in LIGER_WITHOUT_LOSS):
        reason = "`training.liger_kernel_config` replaces the loss"
    if reason is not None:
        raise RecipeError(f"training.label_smoothing_factor: {reason}. Remove the key.")
