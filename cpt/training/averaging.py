"""Average gradients over all processes during the backward pass, in buckets from the last weight to the first."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

BUCKET_BYTES = 2**26
ALIGNED = 64  # numbers: the optimizer's kernel loads 16 bytes at once


class GradientBucket:
    """Weights whose fp32 gradients are sent together. Afterwards these gradients are views of one flat tensor."""

    def __init__(self) -> None:
        self.starts: dict[torch.Tensor, int] = {}
        self.size = 0
        self.clear()

    def add(self, weight: torch.Tensor) -> None:
        start = -(-self.size // ALIGNED) * ALIGNED
        self.starts[weight] = start
        self.size = start + weight.numel()

    def clear(self) -> None:
        self.gradients: dict[torch.Tensor, torch.Tensor] = {}
        self.flat: torch.Tensor | None = None
        self.work: dist.Work | None = None

    def take(self, weight: torch.Tensor) -> None:
        """Move a weight's gradient into the bucket."""
        gradient = weight.grad
        weight.grad = None
        assert gradient is not None
        if weight in self.gradients:
            self.gradients[weight] += gradient
        elif (
            len(self.starts) == 1
        ):  # sent without a copy: an embedding's may be larger than a bucket
            self.flat = self.gradients[weight] = gradient
        else:
            self.gradients[weight] = self.part_of(weight).copy_(gradient)

    def part_of(self, weight: torch.Tensor) -> torch.Tensor:
        if self.flat is None:
            self.flat = torch.zeros(self.size, device=weight.device)
        start = self.starts[weight]
        return self.flat.view(-1)[start : start + weight.numel()].view(weight.shape)

    def send(self) -> None:
        """Start the sum of all processes' gradients; those that are missing here count as zeros."""
        self.part_of(next(iter(self.starts)))  # made if there is no gradient
        assert self.flat is not None
        self.work = dist.all_reduce(self.flat.div_(dist.get_world_size()), async_op=True)


class AverageInBackward:
    """Averages the gradients of weights over all processes, while the backward pass computes further ones.

    Each process sends the same buckets in the same order. A bucket with a missing gradient, and those after it, are
    sent after the backward pass.

    Args:
        weights: in the order of the forward pass.
        may_lack: a process may lack gradients that others have, if none of its tokens used an expert.
    """

    def __init__(self, weights: Sequence[torch.Tensor], *, may_lack: bool) -> None:
        self.weights = list(weights)
        self.may_lack = may_lack
        self.bucket_of: dict[torch.Tensor, GradientBucket] = {}
        self.buckets: list[GradientBucket] = []
        for weight in reversed(self.weights):
            if not self.buckets or 4 * (self.buckets[-1].size + weight.numel()) > BUCKET_BYTES:
                self.buckets.append(GradientBucket())
            self.buckets[-1].add(weight)
            self.bucket_of[weight] = self.buckets[-1]
            weight.register_post_accumulate_grad_hook(self.take)
        self.is_active = False
        self.num_sent = 0

    @contextmanager
    def during_backward(self) -> Iterator[None]:
        """Average the gradients of a step: its last backward pass runs within."""
        self.is_active = True
        self.num_sent = 0
        try:
            yield
            self.finish()
        finally:
            self.is_active = False
            for bucket in self.buckets:
                bucket.clear()

    @torch.no_grad()
    def take(self, weight: torch.Tensor) -> None:
        bucket = self.bucket_of[weight]
        if not self.is_active or bucket.work is not None:
            return  # a second gradient of a weight, by a checkpoint's own backward pass, is averaged at the end
        bucket.take(weight)
        self.send(only_complete=True)

    def send(self, *, only_complete: bool) -> None:
        """Send buckets in their order, up to the first incomplete one or all of them."""
        for bucket in self.buckets[self.num_sent :]:
            if only_complete and len(bucket.gradients) < len(bucket.starts):
                return
            bucket.send()
            self.num_sent += 1

    @torch.no_grad()
    def finish(self) -> None:
        for weight in self.weights:
            bucket = self.bucket_of[weight]
            if weight.grad is not None and bucket.work is None:
                bucket.take(weight)  # of earlier micro-batches only
        self.send(only_complete=False)
        has_gradient = [weight in self.bucket_of[weight].gradients for weight in self.weights]
        is_late = [weight.grad is not None for weight in self.weights]
        if self.may_lack:
            # Exchanged between hosts, so that none of them waits for its GPU.
            anywhere = torch.tensor([has_gradient, is_late], dtype=torch.int32)
            dist.all_reduce(anywhere, op=dist.ReduceOp.MAX)
            has_gradient, is_late = anywhere.bool().tolist()
        for bucket in self.buckets:
            assert bucket.work is not None
            bucket.work.wait()
        for weight, is_present, needs_second in zip(
            self.weights, has_gradient, is_late, strict=True
        ):
            late = weight.grad
            part = self.bucket_of[weight].part_of(weight)
            if needs_second:
                late = torch.zeros_like(part) if late is None else late
                dist.all_reduce(late.div_(dist.get_world_size()))
                part += late
            if is_present:
                weight.grad = part
