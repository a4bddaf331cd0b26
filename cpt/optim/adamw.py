"""AdamW (arXiv 1711.05101): with an fp32 master copy, with few bytes per weight, or with states on the host."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise
from typing import Any, Literal

import torch
from torch.distributed.tensor import DTensor

from cpt.errors import CheckpointError, RecipeError, ResourceError
from cpt.hardware import host_memory
from cpt.optim.adamw_update import BLOCK, DECADES, adamw_update, can_launch, part, update_directly
from cpt.optim.groups import IS_EMBEDDING, ParameterGroups
from cpt.recipe.schema import Recipe
from cpt.torch_internals import foreach_add

Rounding = Literal["kahan", "stochastic"]
# Its loss was closest to that of fp32 weights (docs/reference/training.md), and it needs no state.
DEFAULT_ROUNDING: Rounding = "stochastic"


def automatic_dtype(recipe: Recipe, *, deepspeed: bool, on_gpu: bool) -> torch.dtype:
    """Return the dtype for `model.dtype: auto`: bfloat16 if `training.bf16` is on and updates use an fp32 copy.

    DeepSpeed and `adamw` keep an fp32 master copy, and adapters are fp32. The other optimizers keep no copy, so their
    weights stay fp32, and so do FSDP2's shards, which are the master copy. Without a GPU bfloat16 does not save time,
    and without Triton, which `on_gpu` includes, `adamw` needs fp32 weights: no kernel updates a master copy.
    """
    training = recipe.training
    sharded = training.get("fsdp") or training.get("parallelism_config")
    has_master = on_gpu and not sharded and recipe.optimizer.name == "adamw"
    is_half = training.get("bf16") and (deepspeed or recipe.model.lora is not None or has_master)
    if is_half:
        return torch.bfloat16
    return torch.float32


def adamw(
    groups: ParameterGroups,
    learning_rate: float,
    of_engine: Callable[..., torch.optim.Optimizer] | None = None,
    *,
    betas: Sequence[float] = (0.9, 0.95),
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    rounding: Rounding | None = None,
) -> torch.optim.Optimizer:
    """AdamW with torch's fused kernel; weights in half precision have fp32 moments and an fp32 master copy.

    Args:
        of_engine: another implementation, for an engine that keeps the fp32 weights, which need no rounding.
        rounding: of bfloat16 weights, instead of a master copy.
    """
    options: dict[str, Any] = {
        "lr": learning_rate,
        "betas": (betas[0], betas[1]),
        "eps": eps,
        "weight_decay": weight_decay,
    }
    if of_engine is not None:
        return of_engine(groups, **options)
    if trains_half(groups):
        return OneKernelAdamW(groups, rounding=rounding, **options)
    return fused_by_torch(groups, **options)


fused_by_torch = partial(torch.optim.AdamW, fused=True)


def trains_half(groups: ParameterGroups) -> bool:
    parameters = chain.from_iterable(group["params"] for group in groups)
    return any(parameter.dtype in (torch.bfloat16, torch.float16) for parameter in parameters)


def adamw_8bit(
    groups: ParameterGroups,
    learning_rate: float,
    paged: bool = False,
    *,
    betas: Sequence[float] = (0.9, 0.95),
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    rounding: Rounding = DEFAULT_ROUNDING,
) -> torch.optim.Optimizer:
    """AdamW with moments in 8 bit (arXiv 2110.02861); those of embeddings are fp32.

    Args:
        rounding: of bfloat16 weights; fp32 weights are not rounded.
    """
    options = {"lr": learning_rate, "betas": betas, "eps": eps, "weight_decay": weight_decay}
    return OneKernelAdamW(groups, rounding=rounding, eight_bit=True, paged=paged, **options)


def paged_adamw_8bit(
    groups: ParameterGroups,
    learning_rate: float,
    *,
    betas: Sequence[float] = (0.9, 0.95),
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    rounding: Rounding = DEFAULT_ROUNDING,
) -> torch.optim.Optimizer:
    """As `adamw_8bit`, with the states of large parameters in pinned host memory, copied while the GPU computes."""
    return adamw_8bit(
        groups,
        learning_rate,
        True,
        betas=betas,
        eps=eps,
        weight_decay=weight_decay,
        rounding=rounding,
    )


# Smaller parameters keep fp32 moments, as in bitsandbytes: the savings would be small.
FEWEST_IN_8_BIT = 4096
FEWEST_ON_HOST = 100_000


class OneKernelAdamW(torch.optim.Optimizer):
    """AdamW with states in fp32 or 8 bit, one kernel for each parameter.

    Gradient scalers and the loss guard set `found_inf`, a flag on the device: if it is 1, a step changes no state, and
    the host does not wait for it. `grad_scale` divides the gradients.

    Args:
        rounding: of bfloat16 weights; None keeps fp32 master copies of weights in half precision.
        eight_bit: moments in 8 bit (arXiv 2110.02861), except for embeddings and small parameters.
        paged: keep states of large parameters in pinned host memory.
        defaults: `lr`, `betas`, `eps` and `weight_decay`.
    """

    grad_scale: torch.Tensor | None = None
    found_inf: torch.Tensor | None = None

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        rounding: Rounding | None = None,
        eight_bit: bool = False,
        paged: bool = False,
        **defaults: Any,
    ) -> None:
        self.rounding = rounding
        self.eight_bit = eight_bit
        self.paged = paged
        self.layouts: dict[torch.Tensor, dict[str, torch.dtype]] = {}
        """Names and dtypes of each parameter's states, except its step."""
        self.pages: Pages | None = None
        self.arenas: dict[torch.dtype, torch.Tensor] = {}
        """Host memory for all states of a dtype: torch rounds each pinned allocation up to a power of two, and cannot
        save a storage with several dtypes."""
        self.used: Counter[torch.dtype] = Counter()
        super().__init__(groups, {**defaults, "betas": tuple(defaults["betas"])})
        self._step_supports_amp_scaling = (
            True  # tells torch and accelerate that it handles `found_inf`
        )

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            states = [self.state_of(parameter) for parameter in parameters]
            if states:
                # A skipping kernel changes no state, so steps can be counted before it.
                steps = [state["step"] for state in states]
                increments: Any = 1
                if self.found_inf is not None:
                    increments = [1 - self.found_inf.to(steps[0].device)] * len(steps)
                foreach_add(steps, increments)
            for parameter, state in zip(parameters, states, strict=True):
                self.update(parameter, state, group)

    def update(
        self, parameter: torch.Tensor, state: dict[str, torch.Tensor], group: dict[str, Any]
    ) -> None:
        assert parameter.grad is not None, "only parameters with a gradient are updated"
        weights = flat(parameter)
        gradients = flat(parameter.grad)
        number = self.numbers[parameter]
        arrays = {name: flat(value) for name, value in state.items() if name != "step"}
        rounding = "nearest"
        if "master" in arrays:
            rounding = "master"
        elif parameter.dtype == torch.bfloat16 and self.rounding is not None:
            rounding = self.rounding
        pieces: Iterable[tuple[int, int, Arrays]] = [(0, len(weights), arrays)]
        if self.is_on_host(parameter):
            if parameter.is_cuda and self.pages is None:
                self.pages = Pages(parameter.device)
            if self.pages is not None:
                pieces = self.pages.pieces(number, arrays)
        update: Callable[..., None] = adamw_update
        if can_launch(weights):
            update = update_directly
        for first, end, piece in pieces:
            update(
                weights[first:end],
                gradients[first:end],
                piece["exp_avg"],
                piece["exp_avg_sq"],
                piece.get("exp_avg_scale"),
                piece.get("exp_avg_sq_scale"),
                piece.get("master", piece.get("compensation")),
                state["step"],
                self.grad_scale,
                self.found_inf,
                rounding,
                first,
                number,
                group["lr"],
                group["weight_decay"],
                *group["betas"],
                group["eps"],
            )

    @property
    def has_master(self) -> bool:
        return any("master" in layout for layout in self.layouts.values())

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        self.layouts |= {parameter: self.layout(parameter, group) for parameter in group["params"]}
        self.numbers = {parameter: number for number, parameter in enumerate(self.layouts)}

    def layout(self, parameter: torch.Tensor, group: dict[str, Any]) -> dict[str, torch.dtype]:
        if parameter.dtype == torch.float16 and self.rounding is not None:
            raise RecipeError(
                "`optimizer`: states in 8 bit and `rounding` need `model.dtype` bfloat16 or float32."
            )
        in_8_bit = (
            self.eight_bit
            and not group.get(IS_EMBEDDING, False)
            and parameter.numel() >= FEWEST_IN_8_BIT
        )
        layout: dict[str, torch.dtype] = {}
        for name in DECADES:
            layout[name] = torch.uint8 if in_8_bit else torch.float32
        if in_8_bit:
            for name in DECADES:
                layout[f"{name}_scale"] = torch.float32
        if parameter.dtype != torch.float32 and self.rounding is None:
            layout["master"] = torch.float32
        if parameter.dtype == torch.bfloat16 and self.rounding == "kahan":
            layout["compensation"] = torch.bfloat16
        return layout

    def state_of(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        state: dict[str, torch.Tensor] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            for name, dtype in self.layouts[parameter].items():
                state[name] = self.zeros(parameter, name, dtype)
            if "master" in state:
                state["master"].copy_(parameter.detach())
        return state

    def zeros(self, parameter: torch.Tensor, name: str, dtype: torch.dtype) -> torch.Tensor:
        shape = self.shape_of(parameter, name)
        if not self.is_on_host(parameter):
            if name.endswith("_scale"):
                return torch.zeros(shape, dtype=dtype, device=parameter.device)
            return torch.zeros_like(parameter, dtype=dtype, memory_format=torch.contiguous_format)
        if not self.arenas:
            self.arenas = self.allocate_arenas(parameter.device)
        size = shape.numel() * dtype.itemsize
        start = self.used[dtype]
        self.used[dtype] += aligned(size)
        return self.arenas[dtype][start : start + size].view(dtype).view(shape)

    def allocate_arenas(self, device: torch.device) -> dict[torch.dtype, torch.Tensor]:
        sizes: Counter[torch.dtype] = Counter()
        for parameter, layout in self.layouts.items():
            if self.is_on_host(parameter):
                for name, dtype in layout.items():
                    sizes[dtype] += aligned(self.shape_of(parameter, name).numel() * dtype.itemsize)
        try:
            return {dtype: host_memory(size, device) for dtype, size in sizes.items()}
        except (torch.cuda.CudaError, OSError) as problem:
            raise ResourceError(
                f"`optimizer.name`: {sizes.total() / 2**30:.1f} GiB of host memory could not be page-locked"
                f" ({problem}). Free some, or use adamw_8bit."
            ) from problem

    def shape_of(self, parameter: torch.Tensor, name: str) -> torch.Size:
        """Scales have one number per block, other states one per weight."""
        if name.endswith("_scale"):
            return torch.Size([-(-parameter.numel() // BLOCK)])
        return parameter.shape

    def is_on_host(self, parameter: torch.Tensor) -> bool:
        return self.paged and parameter.numel() >= FEWEST_ON_HOST

    def state_dict(self) -> dict[str, Any]:
        if self.pages is not None:
            self.pages.wait()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load states without rounding them to the parameters' dtype, as torch would."""
        if self.pages is not None:
            self.pages.wait()
        self.pages = None
        self.arenas.clear()
        self.used.clear()
        super().load_state_dict({**state_dict, "state": {}})
        numbers = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        parameters = chain.from_iterable(group["params"] for group in self.param_groups)
        by_number = dict(zip(numbers, parameters, strict=True))
        for number, saved in state_dict["state"].items():
            parameter = by_number[number]
            expected = {"step", *self.layouts[parameter]}
            if saved.keys() != expected:
                raise CheckpointError(
                    f"`optimizer`: the checkpoint has {', '.join(sorted(saved))} for a parameter, not"
                    f" {', '.join(sorted(expected))}. Use its recipe, or start with --new."
                )
            for name, tensor in self.state_of(parameter).items():
                tensor.copy_(saved[name])


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view in one dimension; of a sharded tensor, this process' part."""
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    return tensor.detach().view(-1)


# --- states in host memory -------------------------------------------------------------------------------------------

ALIGNED = 512  # bytes: states are aligned like torch's allocations
BUFFER = 2**25  # bytes of one piece's states
BUFFERS = 2
PIECES_OF = 4096  # numbers: pieces are multiples of it, so that blocks are whole and loads wide
Arrays = dict[str, torch.Tensor]
Key = tuple[int, int]  # a parameter's index, and the start of a piece


def aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


class Streams:
    """CUDA's streams; tests replace them."""

    def __init__(self, device: torch.device) -> None:
        self.to_gpu = torch.cuda.Stream(device)
        self.to_host = torch.cuda.Stream(device)

    def current(self) -> Any:
        return torch.cuda.current_stream(self.to_gpu.device)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)


@dataclass(frozen=True)
class Fetched:
    """A piece's states on the GPU, or on their way to it."""

    key: Key
    buffer: int
    arrays: Arrays
    arrived: Any
    """An event of the stream that copies them."""


class Pages:
    """Moves pieces of states to the GPU, one after the other.

    Two streams, one per direction, and two buffers on the GPU: a piece arrives while the previous one is copied back.
    The host never waits. The order of pieces is known from the last step, so the next one is prefetched.
    """

    def __init__(self, device: torch.device, streams: Any = None) -> None:
        self.streams: Any = Streams(device) if streams is None else streams
        self.buffers = [
            torch.empty(BUFFER, dtype=torch.uint8, device=device) for _ in range(BUFFERS)
        ]
        self.free = [self.streams.current().record_event()] * BUFFERS
        """By buffer, an event: its piece is copied back, so that another may arrive."""
        self.back: dict[Key, Any] = {}
        """By piece, an event: it is back on the host."""
        self.hosts: dict[Key, Arrays] = {}
        self.next_of: dict[Key | None, Key] = {}
        self.last: Key | None = None
        self.coming: Fetched | None = None
        self.fetched = 0

    def pieces(self, parameter: int, arrays: Arrays) -> Iterator[tuple[int, int, Arrays]]:
        """Yield start and end of each piece, and its states on the GPU; they are written back at the next piece."""
        numbers = len(arrays["exp_avg"])
        bytes_per_number = sum(array.nbytes for array in arrays.values()) / numbers
        size = int((BUFFER - len(arrays) * ALIGNED) / bytes_per_number) // PIECES_OF * PIECES_OF
        for first, end in pairwise([*range(0, numbers, size), numbers]):
            key = parameter, first
            host_arrays = {name: part(name, array, first, end) for name, array in arrays.items()}
            self.hosts[key] = host_arrays
            if self.coming is None or self.coming.key != key:
                self.coming = self.fetch(key)
            piece = self.coming
            self.streams.current().wait_event(piece.arrived)
            yield first, end, piece.arrays
            # After its update, start copying it to the host.
            stream = self.streams.to_host
            stream.wait_event(self.streams.current().record_event())
            with self.streams.on(stream):
                for name, host_array in host_arrays.items():
                    host_array.copy_(piece.arrays[name], non_blocking=True)
            copied = stream.record_event()
            self.free[piece.buffer] = copied
            self.back[key] = copied
            self.next_of[self.last] = key
            self.last = key
            self.coming = None
            if key in self.next_of:
                self.coming = self.fetch(self.next_of[key])

    def fetch(self, key: Key) -> Fetched:
        number = self.fetched % BUFFERS
        self.fetched += 1
        stream = self.streams.to_gpu
        stream.wait_event(self.free[number])
        if key in self.back:
            stream.wait_event(self.back[key])
        start = 0
        arrays = {}
        with self.streams.on(stream):
            for name, host_array in self.hosts[key].items():
                array = self.buffers[number][start : start + host_array.nbytes]
                arrays[name] = array.view(host_array.dtype)
                arrays[name].copy_(host_array, non_blocking=True)
                start += aligned(host_array.nbytes)
        return Fetched(key=key, buffer=number, arrays=arrays, arrived=stream.record_event())

    def wait(self) -> None:
        for stream in (self.streams.to_gpu, self.streams.to_host):
            stream.synchronize()
