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
from cpt.models.families import PaddedVocabularyHead
from cpt.torch_internals import compiled_call, set_compiled_call, uncompiled_call

IGNORED = -100
LIGER_WITHOUT_LOSS = {"fused_linear_cross_entropy": False, "cross_entropy": False}
FACTORS = ("logit_scale", "lm_head_multiplier", "output_multiplier", "logits_scaling")
LOGIT_BYTES_AT_ONCE = 2 * 2**30  # of a chunk, in half precision
MOST_TOKENS = 8192
FEWEST_TOKENS = 256
PADDED_TO = (
    64  # logits in a row of the buffer: rows of an odd vocabulary (GPT-2: 50,257) are aligned
)
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
    return max(FEWEST_TOKENS, min(MOST_TOKENS, 2 ** (tokens.bit_length() - 1 if tokens else 0)))


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
    logits: torch.Tensor, targets: torch.Tensor, scale: torch.Tensor, cap: float, gradient: bool
) -> torch.Tensor:
    """Return the cross entropy of each token in fp32, [T]; 0 if its target is -100.

    Other targets outside the vocabulary have NaN as their loss and gradient, which the loss guard stops.

    Args:
        logits: [T, V]; replaced by their gradient times `scale` if `gradient`, else unchanged. Words
            with -inf are masked: their gradient is 0.
        scale: fp32, one number.
        cap: soft cap of the logits; 0 for none.
    """
    if has_kernel(logits):
        from cpt.models.fused_loss_kernel import launch  # only torch's CUDA builds include Triton

        return launch(logits, targets, scale, cap, gradient, ignored=IGNORED, padding=PADDED_TO)
    losses = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    for start in range(0, len(logits), ROWS_ON_CPU):
        rows = slice(start, start + ROWS_ON_CPU)
        values = logits[rows].float()
        wanted = targets[rows]
        if cap:
            values = cap * torch.tanh(values / cap)
        is_ignored = (wanted == IGNORED).unsqueeze(1)
        is_word = ((wanted >= 0) & (wanted < logits.shape[1])).unsqueeze(1)
        index = wanted.unsqueeze(1).where(is_word, 0)
        normaliser = values.logsumexp(1, keepdim=True).where(is_word, math.nan)
        losses[rows] = (normaliser - values.gather(1, index)).masked_fill_(is_ignored, 0).squeeze(1)
        if gradient:
            slope = 1 - (values / cap) ** 2 if cap else 1.0
            probabilities = (values - normaliser).exp_()
            probabilities.scatter_add_(1, index, torch.full_like(index, -1, dtype=values.dtype))
            logits[rows] = probabilities.mul_(scale).mul_(slope).masked_fill_(is_ignored, 0)
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
        for some, others in zip(left.split(ROWS_ON_CPU), right.split(ROWS_ON_CPU), strict=True):
            total.addmm_(some.t().float(), others.float())


@add_product.register_fake
def _(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    return None


class LinearCrossEntropy(torch.autograd.Function):
    """`scale` times the summed cross entropy of a linear head's logits; all gradients come from the forward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        scale: torch.Tensor,
        cap: float,
        chunk: int | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss, in fp32, and the unscaled cross entropy of each token, [T].

        Args:
            hidden: [T, D]; weight: [V, D]; bias: [V]; targets: [T].
            scale: fp32, one number: 1 over the tokens of the step.
            cap: soft cap of the logits; 0 for none.
            chunk: tokens per chunk; None for `chunk_of`.
        """
        kind = hidden.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
        for_hidden, for_weight, for_bias = ctx.needs_input_grad[:3]
        # fp16 gradients would underflow before the division; bf16 has fp32's exponent range.
        inside = torch.ones_like(scale) if dtype == torch.float16 else scale
        with torch.autocast(kind, enabled=False):
            inputs = hidden.to(dtype)
            head = weight.to(dtype)
            accumulates = for_weight and weight.dtype != torch.float32
            size = chunk or chunk_of(len(inputs), *head.shape, accumulates=accumulates)
            in_one = size >= len(inputs) and weight.dtype == dtype
            of_hidden = torch.empty_like(inputs) if for_hidden else None
            of_weight = (
                torch.zeros_like(head, dtype=torch.float32) if for_weight and not in_one else None
            )
            of_bias = (
                torch.zeros_like(bias, dtype=torch.float32)
                if bias is not None and for_bias
                else None
            )
            losses = torch.empty(len(inputs), dtype=torch.float32, device=inputs.device)
            # The kernel zeroes the padding; torch's products on a CPU would read it, so there is none without it.
            width = -(-len(head) // PADDED_TO) * PADDED_TO if has_kernel(inputs) else len(head)
            buffer = inputs.new_empty(min(size, len(inputs)), width)[:, : len(head)]
            for start in range(0, len(inputs), size):
                tokens = slice(start, start + size)
                part = inputs[tokens]
                logits = torch.mm(part, head.t(), out=buffer[: len(part)])
                if bias is not None:
                    logits += bias
                losses[tokens] = cross_entropy_in_place(
                    logits, targets[tokens], inside, cap, for_hidden or for_weight
                )
                if of_hidden is not None:
                    torch.mm(logits, head, out=of_hidden[tokens])
                if for_weight and of_weight is None:
                    of_weight = logits.t() @ part
                elif of_weight is not None:
                    add_product(of_weight, logits, part)
                if of_bias is not None:
                    of_bias += logits.sum(0, dtype=torch.float32)
        ctx.mark_non_differentiable(losses)
        ctx.made = of_hidden, of_weight, of_bias
        ctx.dtypes = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
        ctx.outside = scale if inside is not scale else None
        return losses.sum() * scale, losses

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, _: torch.Tensor) -> Any:  # type: ignore[override]
        if ctx.made is None:
            raise RuntimeError(
                "the fused loss supports only one backward pass. Compute the loss again."
            )
        made = ctx.made
        ctx.made = None
        factor = gradient if ctx.outside is None else gradient * ctx.outside
        pairs = zip(made, ctx.dtypes, strict=True)
        return (
            *(None if one is None else one.mul_(factor).to(dtype) for one, dtype in pairs),
            None,
            None,
            None,
            None,
        )


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
    return float((vars(model).get(name) if weight is None else weight) or 0)


def balance_weight(model: PreTrainedModel | PeftModel) -> float:
    """Return the weight of the loss that balances experts."""
    whole = without_adapter(model)
    return penalty_of(whole, PENALTIES[0]) or penalty_of(whole, PENALTIES[1])


def without_adapter(model: nn.Module) -> Any:
    if isinstance(model, PeftModel):
        return model.get_base_model()
    return model


class OwnLoss:
    """The model's own loss function, with label smoothing if requested.

    transformers smooths labels outside of the model: it shifts them only for its own families without FSDP2, and
    counts the words that a padded vocabulary masks. Here they are as the model's own loss has them.
    """

    def __init__(self, model: PreTrainedModel | PeftModel, smoothing: float = 0.0) -> None:
        whole = without_adapter(model)
        self.model = whole
        self.plain = whole.loss_function
        self.smoothing = smoothing
        self.memory = CrossEntropyMemory(whole)
        whole.loss_function = self

    def __call__(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,
        vocab_size: int,
        num_items_in_batch: torch.Tensor | int | None = None,
        shift_labels: torch.Tensor | None = None,
        **options: Any,
    ) -> torch.Tensor:
        if not self.model.training or not self.smoothing:
            loss: torch.Tensor = self.plain(
                logits,
                labels,
                vocab_size,
                num_items_in_batch=num_items_in_batch,
                shift_labels=shift_labels,
                **options,
            )
        else:
            targets = next_tokens(labels) if shift_labels is None else shift_labels
            targets = targets.reshape(-1).to(logits.device)
            words = self.model.config.to_dict().get(PADDED_VOCABULARY)
            summed = F.cross_entropy(
                logits[..., :words].flatten(0, -2).float(),
                targets,
                ignore_index=IGNORED,
                reduction="sum",
                label_smoothing=self.smoothing,
            )
            count = (targets != IGNORED).sum() if num_items_in_batch is None else num_items_in_batch
            loss = summed / count
        if self.model.training:
            return self.memory.remember(loss)
        return loss


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
        whole = without_adapter(model)
        self.model = whole
        self.called: Any = whole.get_output_embeddings()
        """The module that the model calls: the head, or peft's wrapper around its trained copy."""
        self.head: Any = self.called
        if isinstance(self.called, ModulesToSaveWrapper):
            self.head = self.called.modules_to_save[self.called.active_adapters[0]]
        self.is_linear = type(self.head) in (
            nn.Linear,
            PaddedVocabularyHead,
        )  # FSDP2 will change its class
        self.tokens = tokens
        self.plain = whole.loss_function
        self.own_forward = self.head.forward
        self.is_random = any(
            isinstance(module, nn.Dropout) and module.p > 0 for module in self.head.modules()
        )
        self.is_scorable: bool | None = None
        """Whether the model only applies `factor` and `cap` to its logits; None before the first `score`."""
        self.memory = CrossEntropyMemory(whole)
        config: PreTrainedConfig = whole.config.get_text_config()
        values = config.to_dict()
        # The model multiplies its logits by it after the head; names in transformers' configs differ.
        self.factor = float(
            next((values[name] for name in FACTORS if values.get(name) is not None), 1.0)
        )
        if values.get("logits_scaling") and config.model_type != "hyperclovax":
            self.factor = 1 / float(values["logits_scaling"])
        self.cap = float(next((values[name] for name in SOFT_CAPS if values.get(name)), 0))
        self.words: int | None = values.get(PADDED_VOCABULARY)
        """Number of logits that count, if the vocabulary is padded."""
        self.masks = isinstance(self.head, PaddedVocabularyHead)
        """Whether the head masks the other logits; otherwise the model cuts them off."""
        self.hidden: torch.Tensor | None = None
        """The head's input, until the loss is called. The forward pass may return it in another dtype, or times a
        factor of the logits, which the loss applies itself; with a cap the returned value is not used."""
        self.token_losses: torch.Tensor | None = None
        """[rows, tokens] of the last micro-batch, fp32: each position's loss of the next token."""
        self.own_call = compiled_call(self.called)
        self.install()

    def install(self) -> None:
        self.head.forward = self.forward_of_head
        self.model.loss_function = self
        set_compiled_call(self.called, self.call_of_head)

    def remove(self) -> None:
        self.head.forward = self.own_forward
        self.model.loss_function = self.plain
        set_compiled_call(self.called, self.own_call)

    def call_of_head(self, hidden: torch.Tensor, *targets_and_scale: torch.Tensor) -> Any:
        """Call the head with its hooks, or without them if it only passes hidden states through."""
        if self.head.training and not targets_and_scale:
            return self.forward_of_head(hidden)
        return uncompiled_call(self.called)(hidden, *targets_and_scale)

    def forward_of_head(
        self,
        hidden: torch.Tensor,
        targets: torch.Tensor | None = None,
        scale: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Return hidden states in training, else logits; with targets their loss."""
        if targets is None and not self.head.training:
            return self.own_forward(hidden)
        if targets is None:
            self.hidden = hidden
            if self.changes_values:
                return hidden[..., :1]
            return hidden
        assert scale is not None, "passed with the targets"
        if self.is_linear:
            weight = self.head.weight
            bias = self.head.bias
            if self.words is not None:
                weight = weight[: self.words]
                bias = None if bias is None else bias[: self.words]
            fused: tuple[torch.Tensor, torch.Tensor] = LinearCrossEntropy.apply(
                hidden, weight, bias, targets, scale, self.cap, self.tokens
            )
            return fused
        size = self.tokens or tokens_at_once(self.head.get_parameter("weight").shape[0])
        parts = [
            checkpoint(
                self.losses, part, wanted, use_reentrant=False, preserve_rng_state=self.is_random
            )
            for part, wanted in zip(hidden.split(size), targets.split(size), strict=True)
        ]
        losses = torch.cat(parts)
        return losses.sum() * scale, losses.detach()

    def losses(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = self.capped(self.own_forward(hidden)[..., : self.words].float())
        return F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="none")

    def score(
        self, forward: Callable[..., Any], batch: Mapping[str, Any], labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return each next token's cross entropy in nats, and whether it was the most likely, both [rows, tokens].

        The head is called once, in the model's forward pass, where ZeRO-3 expects it. None for a model that changes
        its logits after the head in an unknown way: instead of logits it gets numbers from -100 to 100, one for each
        word, and must return them times `factor` and capped, whatever the size of its real logits.
        """
        if self.is_scorable is False:
            return None
        losses: list[torch.Tensor] = []
        is_correct: list[torch.Tensor] = []
        probe = torch.empty(0)

        def score_chunks(hidden: torch.Tensor) -> torch.Tensor:
            nonlocal probe
            one = torch.ones((), device=hidden.device)
            given = hidden * self.factor if self.factor != 1 else hidden
            rows = given.reshape(-1, hidden.shape[-1])
            targets = next_tokens(labels).reshape(-1).to(hidden.device)
            for part, wanted in zip(
                rows.split(SCORED_POSITIONS), targets.split(SCORED_POSITIONS), strict=True
            ):
                whole = self.own_forward(part)
                logits = whole[..., : self.words].contiguous()
                losses.append(cross_entropy_in_place(logits, wanted, one, self.cap, False))
                is_correct.append(logits.argmax(-1) == wanted)
            probe = torch.linspace(-LARGEST_PROBE, LARGEST_PROBE, whole.shape[-1]).to(hidden)
            return probe.repeat(*hidden[..., :1, 0].shape, 1)

        self.head.forward, before = score_chunks, self.head.forward
        try:
            output = forward(**batch, use_cache=False)
        finally:
            self.head.forward = before
        if self.is_scorable is None:
            expected = self.capped(self.factor * probe.float())
            expected = expected if self.masks else expected[: self.words]
            returned = output.logits.float()
            self.is_scorable = returned.shape[-1] == len(expected) and torch.allclose(
                returned, expected.expand_as(returned), rtol=0.02, atol=1e-4
            )
            if not self.is_scorable:
                print_once(
                    f"Held-out text is scored from all logits: {type(self.model).__name__} changes them after its"
                    " head."
                )
        if not self.is_scorable:
            return None
        return torch.cat(losses).view(labels.shape), torch.cat(is_correct).view(labels.shape)

    @property
    def changes_values(self) -> bool:
        """Whether the model's own operations on its logits have no meaning for hidden states."""
        return bool(self.cap) or self.words is not None

    def capped(self, logits: torch.Tensor) -> torch.Tensor:
        if self.cap:
            return self.cap * torch.tanh(logits / self.cap)
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
        """Return the mean cross entropy over the labels, or their sum over `num_items_in_batch`. In training, `logits`
        are hidden states, [rows, tokens, width]."""
        if not self.head.training:
            return self.plain(
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
        if self.changes_values:
            hidden = self.hidden * self.factor if self.factor != 1 else self.hidden
        hidden = hidden.reshape(-1, hidden.shape[-1])
        self.hidden = None
        targets = shift_labels.reshape(-1).to(hidden.device)
        count = num_items_in_batch if num_items_in_batch is not None else (targets != IGNORED).sum()
        count = (
            count
            if isinstance(count, torch.Tensor)
            else hidden.new_full((), count, dtype=torch.float32)
        )
        scale = 1 / count.to(hidden.device, torch.float32)
        loss, losses = self.called(hidden, targets, scale)
        self.token_losses = losses.view(shift_labels.shape)
        return self.memory.remember(loss)


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
    whole = without_adapter(model)
    if "loss_function" not in inspect.unwrap(type(whole).forward).__code__.co_names:
        return f"{type(whole).__name__} does not compute its loss by `self.loss_function`"
    return None


def why_not_fused(model: PreTrainedModel | PeftModel) -> str | None:
    """Return why the loss cannot be computed in chunks; None if it can."""
    whole = without_adapter(model)
    if not hasattr(whole, "get_output_embeddings") or whole.get_output_embeddings() is None:
        return f"{type(whole).__name__} does not define its head (`get_output_embeddings`)"
    if penalty_of(whole, "z_loss_coefficient"):
        return f"the z-loss of {type(whole).__name__} needs all logits"
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
    model: nn.Module, wanted: bool | Literal["auto"], training: TrainingArguments
) -> FusedLoss | OwnLoss | None:
    """Replace the model's loss function; return the new one, or None for a model without one."""
    if not isinstance(model, PreTrainedModel | PeftModel):
        return None
    refuse_unshifted_labels(model)
    on_gpu = training.device.type == "cuda"
    smoothing = training.label_smoothing_factor
    why_not = why_not_fused(model)
    if smoothing:
        check_smoothing(model, training)
        why_not = "`training.label_smoothing_factor` needs all logits"
    if wanted is True and why_not is not None:
        raise RecipeError(f"model.fused_loss: {why_not}. Remove the key.")
    if wanted is True or wanted == "auto" and on_gpu and why_not is None:
        # The hidden states that pass through the head are a view; no model changes them in place.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
        if on_gpu and triton_failure():
            report_fallback("model.fused_loss", "chunks by torch's operations", triton_failure())
        return FusedLoss(model)
    if on_gpu:
        print_once(
            f"The loss is computed from all logits: {why_not or '`model.fused_loss: false`'}."
        )
    return set_up_own_loss(model, training)


def set_up_own_loss(model: nn.Module, training: TrainingArguments) -> OwnLoss | None:
    """Replace the model's loss function by itself with label smoothing; None if it has no such function."""
    if not isinstance(model, PreTrainedModel | PeftModel) or why_not_replaced(model) is not None:
        return None
    return OwnLoss(model, training.label_smoothing_factor)


def refuse_unshifted_labels(model: PreTrainedModel | PeftModel) -> None:
    """Refuse families of transformers whose loss compares logits with the labels of the same position."""
    kind = type(without_adapter(model))
    if kind.__module__.startswith("transformers.") and why_not_replaced(model) is not None:
        raise RecipeError(
            f"model: {kind.__name__} does not shift labels, so it would learn to repeat its input. Use a decoder-only"
            " architecture, such as llama or qwen3."
        )


def check_smoothing(model: PreTrainedModel | PeftModel, training: TrainingArguments) -> None:
    """Raise RecipeError if labels of the model cannot be smoothed."""
    why_not = why_not_replaced(model)
    liger: Mapping[str, Any] = dict(training.liger_kernel_config or {})
    if training.use_liger_kernel and any(liger[name] for name in LIGER_WITHOUT_LOSS):
        why_not = "`training.liger_kernel_config` replaces the loss"
    if why_not is not None:
        raise RecipeError(f"training.label_smoothing_factor: {why_not}. Remove the key.")
