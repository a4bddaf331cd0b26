"""Read the settings from a recipe that determine its run's memory and time."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self, cast

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel

from cpt.data.readers.columns import form_of_stage
from cpt.distributed import read_parallelism
from cpt.hardware import triton_failure
from cpt.models.attention import VARLEN, why_not_varlen
from cpt.models.inventory import runs_along_the_row
from cpt.models.layers import (
    UNDER_FSDP,
    UNDER_ZERO3,
    UNEVEN,
    Recomputing,
    decoder_layers,
    has_experts,
    read_recomputing,
    recomputes_hooks_of_fsdp,
    wanted_compiling,
)
from cpt.optim.adamw import automatic_dtype
from cpt.optim.build import facts_of
from cpt.planning.model_sizes import KINDS, MASKED_FORMS, StageNeeds, read_stage_needs
from cpt.recipe.keys import (
    ACCUMULATION,
    AUTO,
    CHECKPOINTING,
    COMPILING,
    DEFAULT_MICRO_BATCH,
    MICRO_BATCH,
)
from cpt.recipe.schema import Recipe

WRONG_UNDER_AUTOCAST = "compiled norms under autocast may be wrong on an RTX 50 (pytorch#191433)"
BYTES_OF_DTYPE = {"float32": 4, "bfloat16": 2, "float16": 2}
PACKING = ("best_fit", "concatenate", "sliding_window")  # several documents in a row
FEWEST_STEPS = 100  # compiling takes 20 to 60 seconds, which fewer steps do not recover


@dataclass(frozen=True)
class Sharding:
    """Sharding by DeepSpeed or FSDP2; sizes in elements, with DeepSpeed's names and defaults."""

    stage: int
    offload_optimizer: bool = False
    offload_parameters: bool = False
    overlap_comm: bool = True
    reduce_bucket_size: int = 500_000_000
    allgather_bucket_size: int = 500_000_000
    prefetch_bucket_size: int = 50_000_000
    max_live_parameters: int = 1_000_000_000
    max_reuse_distance: int = 1_000_000_000
    sub_group_size: int = 1_000_000_000
    accumulates_in_fp32: bool = False
    """Gradients of several micro-batches (`data_types.grad_accum_dtype`)."""
    is_fsdp: bool = False
    keeps_gathered: bool = False
    """FSDP2: weights stay gathered from the forward to the backward pass (`reshard_after_forward: false`)."""
    reduces_each_micro_batch: bool = False
    """FSDP2: gradients are reduced after each micro-batch, not only after a step's last (`sync_each_batch`)."""


SIZES_OF_SHARDING = {size.name for size in fields(Sharding) if type(size.default) is int}


@dataclass(frozen=True)
class Setup:
    gpus: int
    """Processes on all machines, each with a GPU, or all on the CPU."""
    on_cpu: bool
    micro_batch: int
    """Rows per process at once."""
    sequence_length: int
    accumulation: int
    """Micro-batches per step."""
    half: bool
    """Computes in bf16 or fp16."""
    weights_bytes: int
    """Bytes per weight that layers compute with, or per frozen weight."""
    checkpointing: bool
    fused_loss: bool
    """Requested; `memory_parts.fuses` tests whether the model supports it."""
    packed: bool
    """Rows have several documents or padding, which need a mask except with flash attention."""
    attention: str
    optimizer: str
    lora: Mapping[str, Any] | None
    zero: Sharding | None
    tf32: bool = False
    recomputing: Recomputing = Recomputing()
    """Layers that checkpointing recomputes, and the place of saved activations."""
    rounding: str | None = None
    """Rounding of bfloat16 weights without a master copy."""
    releases: bool = False
    """Each gradient is applied and freed as soon as it is computed."""
    needs: StageNeeds = StageNeeds()
    nodes: int = 1
    """Machines, with equal numbers of GPUs."""
    batch_is_given: bool = False
    """The recipe sets the tokens per step, which determine accumulation."""
    scales_loss: bool = False
    """Computes in fp16."""
    compiles: bool = False
    from_scratch: bool = False
    """The model starts from random weights, so adapters cannot be added."""
    train_only: str | Sequence[str] | None = None

    @property
    def gpus_per_node(self) -> int:
        return self.gpus // self.nodes

    @property
    def as_computed(self) -> Self:
        """Return the setup with weights in the compute dtype, in which FSDP2 gathers them."""
        is_cast = self.zero is not None and self.zero.is_fsdp and self.half
        return replace(self, weights_bytes=2) if is_cast else self

    @property
    def recomputes_all(self) -> bool:
        return self.checkpointing and self.recomputing.every_n_layers == 1

    @property
    def updates_on_host(self) -> bool:
        return self.zero is not None and self.zero.offload_optimizer

    @property
    def pages_states(self) -> bool:
        return self.zero is None and facts_of(self.optimizer).pages_states

    @property
    def sequences(self) -> int:
        """Sequences per process that are processed at once."""
        return self.micro_batch * self.needs.sequences

    @property
    def length(self) -> int:
        """Tokens of the longest sequence: a row, plus generated tokens."""
        return self.sequence_length + self.needs.completion

    @property
    def tokens_at_once(self) -> int:
        return self.sequences * self.length

    @property
    def sampled(self) -> int:
        """Completions that a process samples together."""
        needs = self.needs
        if not needs.completion:
            return 0
        if needs.stage == "gkd":  # samples each micro-batch separately
            return self.micro_batch
        if needs.generation_batch is not None:
            return max(1, needs.generation_batch // self.gpus)
        return self.micro_batch * (needs.steps_per_generation or self.accumulation)

    @property
    def precision(self) -> str:
        if self.half:
            return "half"
        return "tf32" if self.tf32 else "fp32"

    @property
    def tokens_per_step(self) -> int:
        """Tokens per step over all processes; each row counts as `sequence_length`."""
        return self.gpus * self.micro_batch * self.accumulation * self.sequence_length


def read_setup(
    recipe: Recipe,
    gpus: int,
    profile: Mapping[str, Any] | None,
    *,
    attention: str,
    on_cpu: bool = False,
    nodes: int = 1,
) -> Setup:
    """Read the setup; CptError if a teacher is missing or cannot be read.

    Args:
        gpus: processes on all machines; with a global batch, accumulation follows from them.
        profile: the DeepSpeed profile's content.
        attention: attention for `model.attention: auto`; on a GPU, `attention_on_gpu`.
    """
    training, model = recipe.training, recipe.model
    batch_tokens = recipe.budget.global_batch_tokens
    # a process's part of a row
    length = recipe.data.sequence_length // read_parallelism(training).sp_size
    micro_batch = int(training.get(MICRO_BATCH, DEFAULT_MICRO_BATCH))
    accumulation = int(training.get(ACCUMULATION, 1))
    if batch_tokens is not None:
        accumulation = max(1, round(batch_tokens / (micro_batch * gpus * length)))

    zero = read_fsdp_sharding(training) if profile is None else read_deepspeed_sharding(profile)
    zero3 = zero is not None and zero.stage == 3 and not zero.is_fsdp
    is_compiled, _ = compiles(recipe, zero3=zero3, on_cpu=on_cpu)
    fuses_by_default = not on_cpu and not training.get("label_smoothing_factor")

    needs = read_stage_needs(recipe)
    uncounted = (*needs.uncounted, *uncounted_of_engines(training, profile))
    return Setup(
        gpus=gpus,
        on_cpu=on_cpu,
        micro_batch=micro_batch,
        sequence_length=length,
        accumulation=accumulation,
        half=computes_in_half(training),
        weights_bytes=read_weights_bytes(recipe, has_profile=profile is not None, on_cpu=on_cpu),
        checkpointing=any(training.get(key) for key in CHECKPOINTING),
        fused_loss=fuses_by_default if model.fused_loss == "auto" else model.fused_loss is True,
        packed=recipe.data.packing in PACKING or form_of_stage(recipe.stage) in MASKED_FORMS,
        attention=attention,
        optimizer=recipe.optimizer.name,
        lora=model.lora,
        zero=zero,
        tf32=bool(training.get("tf32")),
        recomputing=read_recomputing(training),
        rounding=recipe.optimizer.options.get("rounding"),
        releases=bool(recipe.optimizer.options.get("release_gradients", False)),
        needs=replace(needs, uncounted=uncounted),
        nodes=nodes,
        batch_is_given=batch_tokens is not None,
        scales_loss=bool(training.get("fp16")),
        compiles=is_compiled,
        from_scratch=model.from_scratch,
        train_only=model.train_only,
    )


def read_weights_bytes(recipe: Recipe, *, has_profile: bool, on_cpu: bool) -> int:
    if recipe.model.dtype in BYTES_OF_DTYPE:
        return BYTES_OF_DTYPE[recipe.model.dtype]
    if recipe.training.get("fp16") and has_profile:
        return 2  # the engine rounds its weights
    on_gpu = not on_cpu and not triton_failure()
    return automatic_dtype(recipe, deepspeed=has_profile, on_gpu=on_gpu).itemsize


def uncounted_of_engines(
    training: Mapping[str, Any], profile: Mapping[str, Any] | None
) -> Iterator[str]:
    """Memory of engines that the plan does not include, as text."""
    parallelism = read_parallelism(training)
    if parallelism.sharing_rows > parallelism.sp_size:
        yield "tensor and context parallelism (`training.parallelism_config`): processes are counted as whole"
    elif parallelism.sharing_rows > 1:
        yield "communication of processes that share a row (`training.parallelism_config`)"
    section = (profile or {}).get("zero_optimization") or {}
    if section.get("zero_hpz_partition_size", 1) != 1:
        yield "second copies of the weights (`zero_hpz_partition_size`)"


def attention_on_gpu(recipe: Recipe, config: PreTrainedConfig) -> str:
    """Resolve `model.attention` on a GPU with flash kernels; custom functions are masked like sdpa."""
    attention = recipe.model.attention
    if attention != "auto":
        return "sdpa" if ":" in attention else attention
    is_half = computes_in_half(recipe.training) or recipe.model.dtype in ("bfloat16", "float16")
    is_padded = recipe.data.packing == "token_budget" or form_of_stage(recipe.stage) in MASKED_FORMS
    if not is_half or is_padded or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return "sdpa"
    model_class = cast(type[PreTrainedModel], MODEL_FOR_CAUSAL_LM_MAPPING[type(config)])
    return VARLEN if why_not_varlen(model_class, config) is None else "sdpa"


def read_deepspeed_sharding(profile: Mapping[str, Any]) -> Sharding | None:
    """Read the profile's ZeRO section with DeepSpeed's defaults; None at stage 0."""
    section = profile.get("zero_optimization") or {}
    stage = int(section.get("stage", 0))
    if stage == 0:
        return None
    sizes: dict[str, Any] = {}
    for key, size in section.items():
        name = key.removeprefix("stage3_")
        if name in SIZES_OF_SHARDING and isinstance(size, int | float):
            sizes[name] = int(size)
    data_types = profile.get("data_types") or {}
    return Sharding(
        stage,
        offload_optimizer=is_on_host(section.get("offload_optimizer")),
        offload_parameters=is_on_host(section.get("offload_param")),
        overlap_comm=bool(section.get("overlap_comm", stage == 3)),
        accumulates_in_fp32=data_types.get("grad_accum_dtype") == "fp32",
        **sizes,
    )


def is_on_host(offload: Any) -> bool:
    return isinstance(offload, Mapping) and offload.get("device", "none") != "none"


def read_fsdp_sharding(training: Mapping[str, Any]) -> Sharding | None:
    if not training.get("fsdp"):
        return None
    config = mapping_of(training.get("fsdp_config"))
    options = {str(key).removeprefix("fsdp_"): value for key, value in config.items()}
    accumulation = mapping_of(training.get("accelerator_config")).get(
        "gradient_accumulation_kwargs"
    )
    return Sharding(
        3,
        is_fsdp=True,
        keeps_gathered=options.get("reshard_after_forward", True) is False,
        reduces_each_micro_batch=bool((accumulation or {}).get("sync_each_batch")),
    )


def mapping_of(section: Any) -> Mapping[str, Any]:
    """Return a section of `training`; empty if it is the name of a file."""
    return section if isinstance(section, Mapping) else {}


def computes_in_half(training: Mapping[str, Any]) -> bool:
    return bool(training.get("bf16") or training.get("fp16"))


def is_wrong_under_autocast(recipe: Recipe, capability: str | None) -> bool:
    """Whether compiled layers may be wrong: under autocast on an RTX 50 (seen in torch 2.13, open)."""
    model = recipe.model
    if not (capability or "").startswith("12.") or not computes_in_half(recipe.training):
        return False
    if model.lora is not None:
        return True
    dtype = model.dtype
    if dtype == "auto":
        is_half = automatic_dtype(recipe, deepspeed=False, on_gpu=True).itemsize == 2
        return not is_half
    return dtype != "bfloat16"


def compiles(
    recipe: Recipe,
    *,
    zero3: bool,
    on_cpu: bool,
    model: PreTrainedModel | None = None,
    capability: str | None = None,
) -> tuple[bool, str]:
    """Whether the decoder layers are compiled, and the reason.

    Args:
        model: by default, a plain transformer.
        capability: compute capability of the GPU, if it is known.
    """
    training, stage = recipe.training, recipe.stage
    if wanted_compiling(training) is not None:
        return True, "the recipe enables it"
    if training.get(COMPILING, AUTO) != AUTO:
        return False, "the recipe disables it"

    options = [training.get(f"{key}_kwargs") or {} for key in CHECKPOINTING]
    has_even_rows = (
        recipe.data.packing != "token_budget"
        and form_of_stage(stage) not in MASKED_FORMS
        and (stage not in KINDS or KINDS[stage].completion_limit is None)
    )
    tokens, batch_tokens = recipe.budget.tokens, recipe.budget.global_batch_tokens
    has_few_steps = (
        tokens is not None and batch_tokens is not None and tokens < FEWEST_STEPS * batch_tokens
    )
    reasons = {
        "it needs a GPU": on_cpu,
        UNEVEN: not has_even_rows,
        WRONG_UNDER_AUTOCAST: is_wrong_under_autocast(recipe, capability),
        UNDER_ZERO3: zero3,
        UNDER_FSDP: recomputes_hooks_of_fsdp(training),
        "processes share rows": read_parallelism(training).sharing_rows > 1,
        f"the run has fewer than {FEWEST_STEPS} steps": has_few_steps,
        "it is not tested with quantized weights": bool((recipe.model.lora or {}).get("quantize")),
        "it is not tested with custom model code": recipe.model.trust_remote_code,
        "checkpoints are of torch's older kind (`use_reentrant`)": any(
            option.get("use_reentrant") for option in options
        ),
    }

    if model is not None:
        name = type(model).__name__
        selective = any(option.get("selective") for option in options)
        reasons |= {
            f"transformers does not mark decoder layers in {name}": not decoder_layers(model),
            "the model has recurrent layers": runs_along_the_row(model),
            "`selective` does not work in compiled parts of layers with experts": selective
            and has_experts(model),
        }

    for reason, applies in reasons.items():
        if applies:
            return False, reason
    return True, "the run is on a GPU"
