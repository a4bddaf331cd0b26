"""What GPUs tell each other in a step, how long the links take for it, and how much of that hides behind computing.

Volumes are those of the ZeRO paper (arXiv 1910.02054, section 7) with what the engines really do where that is more:
DeepSpeed's ZeRO-1 and ZeRO-2 bring gradients together by an all-reduce, and ZeRO-2 and ZeRO-3 do it for every
micro-batch (`runtime/zero/stage_1_and_2.py`, `stage3.py`), where DDP and ZeRO-1 do it once for a step. A ring of n
GPUs sends (n-1)/n of the data from each for a gather or a reduce-scatter and twice that for an all-reduce; one machine
sends the others as much as one GPU, divided over its adapters (NVIDIA/nccl-tests, doc/PERFORMANCE.md). An all-reduce
first brings a machine's own GPUs together, so that between N machines it is 2(N-1)/N (NVIDIA/nccl-tests issue 196).
"""

import math
from dataclasses import dataclass

from cpt.planner.facts import ModelFacts
from cpt.planner.links import Links
from cpt.planner.optimizer_terms import accumulates_in_fp32, bytes_of_gradient
from cpt.planner.setup import Setup, Zero

HIDDEN = 0.8  # of computing can have communication beside it: the first and last layers cannot, and both share the GPU
DDP_BUCKET = 25 * 2**20  # bytes, torch's default
GATHER, SCATTER, REDUCE = "gather", "scatter", "all-reduce"
MICROSECOND = 1e-6


@dataclass(frozen=True)
class Traffic:
    """One kind of data that GPUs tell each other."""

    name: str
    how: str
    """`gather`, `scatter` or `all-reduce`."""
    size: float
    """Bytes of the whole, each time."""
    times: int
    """In a step."""
    calls: float
    """Each time: collectives, of which every one has its delay."""
    members: int
    """GPUs that do it together."""
    behind: str = ""
    """Which computing it can hide behind: `forward`, `backward` or `last backward` (of the step's last
    micro-batch)."""

    def sent_by_gpu(self) -> float:
        """Bytes of a step."""
        rounds = 2 if self.how == REDUCE else 1
        return self.times * self.size * rounds * (self.members - 1) / self.members

    def sent_by_node(self, setup: Setup) -> float:
        """Bytes of a step to other machines."""
        groups = self.members / setup.gpus_per_node
        if groups <= 1:
            return 0.0
        return self.times * self.size * 2 * (groups - 1) / groups if self.how == REDUCE else self.sent_by_gpu()

    def seconds(self, setup: Setup, links: Links) -> float:
        """Of a step, alone on the links: the slower of the two, and the way round the ring."""
        nodes = max(1, self.members // setup.gpus_per_node)
        within = self.sent_by_gpu() / links.within.speed if setup.gpus_per_node > 1 else 0.0
        between = self.sent_by_node(setup) / links.speed_of_node
        if self.how == REDUCE:  # a tree: up and down
            hops = (
                2 * (min(self.members, setup.gpus_per_node) - 1) * links.within.hop
                + 2 * math.ceil(math.log2(nodes)) * links.between.hop
            )
        else:
            across = nodes if nodes > 1 else 0
            hops = (self.members - 1 - across) * links.within.hop + across * links.between.hop
        return max(within, between) + self.times * self.calls * max(0.0, hops) * MICROSECOND


def traffic_of(facts: ModelFacts, setup: Setup) -> tuple[Traffic, ...]:
    """All of a step; nothing with one GPU."""
    if setup.gpus == 1:
        return ()
    zero = setup.zero
    if zero is None:
        size = float(bytes_of_gradient(setup) * facts.trained)
        behind = "" if accumulates_in_fp32(setup) else "last backward"
        return (Traffic("gradients", REDUCE, size, 1, max(1.0, size / DDP_BUCKET), setup.gpus, behind),)
    if zero.is_fsdp:
        return of_fsdp(facts, setup, zero)
    if zero.stage < 3:
        return of_divided_states(facts, setup, zero)
    return of_divided_weights(facts, setup, zero)


def of_divided_states(facts: ModelFacts, setup: Setup, zero: Zero) -> tuple[Traffic, ...]:
    """ZeRO-1 and ZeRO-2: gradients are reduced over all, and the updated weights gathered, which nothing hides."""
    size = float(setup.weights_bytes * facts.trained)
    times, behind = (1, "last backward") if zero.stage == 1 else (setup.accumulation, "backward")
    calls = max(1.0, facts.trained / zero.reduce_bucket)
    return (
        Traffic("gradients", REDUCE, size, times, calls, setup.gpus, behind if zero.overlap_comm else ""),
        Traffic("updated weights", GATHER, size, 1, max(1.0, facts.trained / zero.allgather_bucket), setup.gpus),
    )


def of_divided_weights(facts: ModelFacts, setup: Setup, zero: Zero) -> tuple[Traffic, ...]:
    """ZeRO-3: weights are gathered for each forward and backward pass, also of a frozen model; gradients are reduced
    and divided.

    What is used again within `stage3_max_reuse_distance` is not let go: of a large model that is its last layers, and
    of a small one all.
    """
    whole = setup.weights_bytes * facts.parameters * (0.5 if zero.quantized_weights else 1.0)
    kept = min(1.0, zero.max_reuse_distance / 2 / facts.parameters)
    reduced = setup.weights_bytes * facts.trained * (0.25 if zero.quantized_gradients and setup.nodes > 1 else 1.0)
    # A layer stays between being computed again and its backward pass, where it may be kept so long.
    twice = setup.checkpointing and zero.max_reuse_distance < facts.largest_layer
    at_once = min(max(zero.prefetch_bucket, facts.largest_matrix), facts.largest_layer)
    gathers = max(1.0, facts.parameters / at_once)
    forward, backward = ("forward", "backward") if zero.overlap_comm else ("", "")
    passes = setup.accumulation * (2 if twice else 1)
    group = min(zero.secondary, setup.gpus) if zero.secondary > 1 else setup.gpus
    return (
        Traffic("weights for the forward pass", GATHER, whole, setup.accumulation, gathers, setup.gpus, forward),
        Traffic(
            "weights for the backward pass", GATHER, whole * (1 - kept), passes, gathers * (1 - kept), group, backward
        ),
        Traffic(
            "gradients",
            SCATTER,
            reduced,
            setup.accumulation,
            max(1.0, facts.trained / zero.reduce_bucket),
            setup.gpus,
            backward,
        ),
    )


def of_fsdp(facts: ModelFacts, setup: Setup, zero: Zero) -> tuple[Traffic, ...]:
    """FSDP2: layers are gathered as they compute, and gradients reduced in fp32 once for a step (accelerate's
    `no_sync`), or for each micro-batch (`sync_each_batch`).

    The head stays whole from the forward to the backward pass; accelerate shards an embedding that is not tied to it
    like a layer.
    """
    each = 2 if setup.half else setup.weights_bytes
    whole, in_layers = float(each * facts.parameters), float(each * (facts.parameters - facts.head))
    layers = max(1.0, facts.parameters / facts.largest_layer)
    forward = Traffic("weights for the forward pass", GATHER, whole, setup.accumulation, layers, setup.gpus, "forward")
    backward = Traffic(
        "weights for the backward pass", GATHER, in_layers, setup.accumulation, layers, setup.gpus, "backward"
    )
    times, behind = (setup.accumulation, "backward") if zero.reduces_each_micro_batch else (1, "last backward")
    gradients = Traffic("gradients", SCATTER, 4.0 * facts.trained, times, layers, setup.gpus, behind)
    return (forward, gradients) if zero.keeps_gathered else (forward, backward, gradients)


@dataclass(frozen=True)
class Waiting:
    """Communication of a step and what of it is seen."""

    parts: tuple[Traffic, ...]
    seconds: float
    """On the links."""
    exposed: float
    """That the GPUs wait for."""


def waiting_for(facts: ModelFacts, setup: Setup, links: Links | None, *, forward: float, backward: float) -> Waiting:
    """What does not hide.

    Args:
        links: None where nobody knows them: nothing waits.
        forward: seconds of a micro-batch's forward pass.
        backward: likewise, with what is computed again.
    """
    parts = traffic_of(facts, setup) if links is not None and not setup.on_cpu else ()
    if links is None or not parts:
        return Waiting((), 0.0, 0.0)
    seconds = {part: part.seconds(setup, links) for part in parts}
    windows = {
        "forward": setup.accumulation * forward,
        "backward": setup.accumulation * backward,
        "last backward": backward,
        "": 0.0,
    }
    exposed = 0.0
    for name, window in windows.items():
        exposed += max(0.0, sum(time for part, time in seconds.items() if part.behind == name) - HIDDEN * window)
    return Waiting(parts, sum(seconds.values()), exposed)
