"""Does a way to train fit the machine? A short formula of bytes per parameter and per token; every figure is an estimate."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from cpt.errors import RecipeError
from cpt.hardware import GIB
from cpt.init.base_model import BaseModel
from cpt.init.machine import Target
from cpt.models.adapters import adaptable, count_lora_parameters

STATE_BYTES = 16  # a parameter that learns: fp32 weight (or its master), gradient, and the two moments of AdamW
HOST_BYTES = 18  # the same with the bf16 weights beside, all in host memory
LAYER_BYTES = 34  # activations of one layer, for each token and each number of the width, with flash attention (arXiv 2205.05198)
LOGIT_BYTES = 14  # bf16 logits, their fp32 copy, log-softmax and gradient
FUSED_LOGIT_BYTES = 2
FIXED_GIB = 1.0  # CUDA context and workspaces
USABLE = 0.92  # the rest is lost between blocks
BUCKETS_GIB = 1.5  # of DeepSpeed, at the 2e8 elements that the profiles set
MOST_FOR_ZERO2 = 4_000_000_000  # parameters: above, so little is left of 24 GB that each micro-batch is too small for its transfers
MICRO_BATCHES = (16, 8, 4, 2, 1)
MOST_TOKENS = 32_768  # in a micro-batch: more is no faster
FEWEST_TOKENS = 8_192  # fewer leave a GPU idle, so that computing activations twice costs less
ADAPTERS_ONLY = {"r": 64, "lora_alpha": 16, "use_rslora": True}


@dataclass(frozen=True)
class Method:
    """A way to train, with what it needs before the first token."""

    name: str
    """full, lora (with embeddings) or adapters."""
    profile: str | None
    """DeepSpeed profile in deepspeed_configs/."""
    states_gib: float
    """On each GPU, or on the host where there is none."""
    host_gib: float
    slowdown: float = 1.0
    """How much longer a step takes than on GPUs that hold everything; a guess."""
    trained: int = 0
    """Parameters that learn."""


@dataclass(frozen=True)
class Fit:
    """A way to train that fits, and how many rows go through at once."""

    method: Method
    micro_batch: int
    checkpointing: bool
    fused_loss: bool
    memory_gib: float
    """On each GPU, of what it has; estimated."""


def ways_to_train(base: BaseModel, target: Target) -> Iterator[Method]:
    """All parameters before adapters, on the GPU before on the host: the first that fits is taken."""
    parameters, gpus = base.parameters, max(1, target.gpus)
    widest = 4 * base.vocabulary * base.hidden / GIB  # an fp32 copy of the largest matrix, which DeepSpeed makes on its way to the host
    whole = Method("full", None, STATE_BYTES * parameters / GIB, 0, trained=parameters)
    if gpus == 1:
        yield whole
    else:
        yield Method("full", "ds_config_zero1.json", (4 + STATE_BYTES / gpus) * parameters / GIB, 0, 1.1, parameters)
        yield Method("full", "ds_config_production.json", HOST_BYTES / gpus * parameters / GIB + BUCKETS_GIB + widest, 0, 1.3, parameters)
    if not target.on_cpu:
        on_host = HOST_BYTES * parameters / GIB
        if parameters <= MOST_FOR_ZERO2:
            yield Method("full", "ds_config_prototype.json", 2 * parameters / GIB + BUCKETS_GIB + widest, on_host, 2.0, parameters)
        yield Method("full", "ds_config_8b_24gb.json", 2 * BUCKETS_GIB + widest, on_host, 2.0, parameters)
    yield from with_adapters(base, target)


def with_adapters(base: BaseModel, target: Target) -> Iterator[Method]:
    """LoRA with embeddings and head where the model lets us, then without."""
    frozen = (4 if target.on_cpu else 2) * base.parameters
    for name, options in (("lora", {"preset": "cpt"}), ("adapters", ADAPTERS_ONLY)):
        if next(adaptable(base.model), None) is None:
            return
        try:
            trained = count_lora_parameters(base.model, options)
        except RecipeError:  # a tied head that peft cannot follow
            continue
        yield Method(name, None, (frozen + STATE_BYTES * trained) / GIB, 0, trained=trained)


def fit(method: Method, base: BaseModel, target: Target, sequence_length: int) -> Fit | None:
    """The largest micro-batch that fits, with activations kept where they can be; None where not even one row does."""
    if method.host_gib > target.host_memory_gib:
        return None
    room = target.memory_gib * USABLE - FIXED_GIB - method.states_gib
    micro_batches = [size for size in MICRO_BATCHES if size * sequence_length <= max(MOST_TOKENS, sequence_length)]
    for checkpointing in (False,) if target.on_cpu else (False, True):
        for micro_batch in micro_batches:
            tokens = micro_batch * sequence_length
            for fused in (False, True) if base.has_fused_loss and not target.on_cpu else (False,):
                needed = activations_gib(base, tokens, checkpointing=checkpointing, fused=fused, on_cpu=target.on_cpu)
                is_worth_it = checkpointing or target.on_cpu or tokens >= min(FEWEST_TOKENS, micro_batches[0] * sequence_length)
                if needed <= room and is_worth_it:
                    return Fit(method, micro_batch, checkpointing, fused, FIXED_GIB + method.states_gib + needed)
    return None


def with_micro_batch(chosen: Fit, base: BaseModel, target: Target, sequence_length: int, micro_batch: int) -> Fit:
    """The same with fewer rows at once."""
    tokens = micro_batch * sequence_length
    needed = activations_gib(base, tokens, checkpointing=chosen.checkpointing, fused=chosen.fused_loss, on_cpu=target.on_cpu)
    return replace(chosen, micro_batch=micro_batch, memory_gib=FIXED_GIB + chosen.method.states_gib + needed)


def activations_gib(base: BaseModel, tokens: int, *, checkpointing: bool, fused: bool, on_cpu: bool = False) -> float:
    """What a micro-batch keeps for the backward pass, and its logits; in fp32 on a CPU."""
    of_layer = LAYER_BYTES * base.hidden
    layers = 2 * base.layers * base.hidden + of_layer if checkpointing else base.layers * of_layer
    of_token = layers + (FUSED_LOGIT_BYTES if fused else LOGIT_BYTES) * base.vocabulary
    return tokens * of_token * (2 if on_cpu else 1) / GIB
