"""The Triton kernel of the fused loss: compute a row's cross entropy and replace its logits by the gradient."""

import torch
import triton
import triton.language as tl

from cpt.hf_internals import IGNORED

MOST_AT_ONCE = 8192  # logits of a row
WARPS = 16


@triton.jit
def load_logits(row, columns, vocabulary: tl.constexpr, width: tl.constexpr, cap: tl.constexpr):
    """Load logits in fp32, -inf past the vocabulary."""
    values = tl.load(row + columns, mask=columns < width, other=0.0).to(tl.float32)
    if cap > 0:
        # cap * tanh(values / cap); exp may overflow to inf
        values = cap * (1 - 2 / (tl.exp(2 * values / cap) + 1))
    return tl.where(columns < vocabulary, values, -float("inf"))


@triton.jit
def cross_entropy_of_row(
    logits,
    targets,
    losses,
    scale,
    row_stride,
    vocabulary: tl.constexpr,
    width: tl.constexpr,
    cap: tl.constexpr,
    ignored: tl.constexpr,
    block: tl.constexpr,
    gradient: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)  # rows x vocabulary exceeds 2^31
    logits += row * row_stride
    target = tl.load(targets + row)
    columns = tl.arange(0, block)
    if target == ignored:
        tl.store(losses + row, 0.0)
        if gradient:
            for start in range(0, vocabulary, block):
                tl.store(
                    logits + start + columns,
                    tl.zeros([block], logits.dtype.element_ty),
                    mask=start + columns < width,
                )
    else:
        # One pass for the normalizer: the sum of exponentials is rescaled at each larger logit
        # (arxiv.org/abs/1805.02867).
        largest = -float("inf")
        shift = 0.0
        total = 0.0
        target_logit = 0.0
        for start in range(0, vocabulary, block):
            values = load_logits(logits, start + columns, vocabulary, width, cap)
            target_logit += tl.sum(tl.where(start + columns == target, values, 0.0), 0)
            new_largest = tl.maximum(largest, tl.max(values, 0))
            # Logits may be masked with -inf, the whole block too: -inf - -inf would be NaN.
            shift = tl.where(tl.abs(new_largest) == float("inf"), 0.0, new_largest)
            total = total * tl.exp(largest - shift) + tl.sum(tl.exp(values - shift), 0)
            largest = new_largest
        normalizer = tl.where(
            (target < 0) | (target >= vocabulary), float("nan"), shift + tl.log(total)
        )
        tl.store(losses + row, normalizer - target_logit)
        if gradient:
            factor = tl.load(scale)
            for start in range(0, vocabulary, block):
                values = load_logits(logits, start + columns, vocabulary, width, cap)
                slope = (
                    tl.exp(values - normalizer) - tl.where(start + columns == target, 1.0, 0.0)
                ) * factor
                if cap > 0:
                    slope *= 1 - (values / cap) * (values / cap)  # derivative of the cap
                slope = tl.where(start + columns < vocabulary, slope, 0.0)
                tl.store(
                    logits + start + columns,
                    slope.to(logits.dtype.element_ty),
                    mask=start + columns < width,
                )


def launch(
    logits: torch.Tensor,
    targets: torch.Tensor,
    scale: torch.Tensor,
    cap: float,
    gradient: bool,
    *,
    ignored: int = IGNORED,
    padding: int = 64,
) -> torch.Tensor:
    """As `cpt.models.fused_loss.cross_entropy_in_place`. Rows may end with fewer than `padding` unused logits, which
    become 0, so that loads are wide for any vocabulary."""
    losses = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    stride = logits.stride(0)
    vocabulary = logits.shape[1]
    width = stride if stride < vocabulary + padding else vocabulary
    block = min(MOST_AT_ONCE, triton.next_power_of_2(vocabulary))
    cross_entropy_of_row[(len(logits),)](
        logits,
        targets,
        losses,
        scale,
        stride,
        vocabulary,
        width,
        cap,
        ignored,
        block,
        gradient,
        num_warps=WARPS,
    )
    return losses
