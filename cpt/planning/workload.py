"""Read the settings from a recipe that determine its run's memory and time."""

from collections.abc import Mapping, Sequence
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
PAGED = "paged_adamw_8bit"
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
    def updates_on_host(self) -> bool:
        return self.zero is not None and self.zero.offload_optimizer

    @property
    def pages_states(self) -> bool:
        return self.zero is None and self.optimizer == PAGED

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
        return "half" if self.half else "tf32" if self.tf32 else "fp32"

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
    training = recipe.training
    parallelism = read_parallelism(training)
    length = recipe.data.sequence_length // parallelism.sp_size  # a process's part of a row
    micro_batch = int(training.get(MICRO_BATCH, DEFAULT_MICRO_BATCH))
    accumulation = int(training.get(ACCUMULATION, 1))
    if recipe.budget.global_batch_tokens is not None:
        accumulation = max(
            1, round(recipe.budget.global_batch_tokens / (micro_batch * gpus * length))
        )
    zero = read_deepspeed_sharding(profile) if profile is not None else read_fsdp_sharding(training)
    written = {"float32": 4, "bfloat16": 2, "float16": 2}.get(recipe.model.dtype)
    on_gpu = not on_cpu and not triton_failure()
    automatic = automatic_dtype(recipe, deepspeed=profile is not None, on_gpu=on_gpu).itemsize
    if training.get("fp16") and profile is not None:
        automatic = 2  # the engine rounds its weights
    needs = read_stage_needs(recipe)
    uncounted = list(needs.uncounted)
    if parallelism.sharing_rows > parallelism.sp_size:
        uncounted.append(
            "tensor and context parallelism (`training.parallelism_config`): processes are counted as whole"
        )
    elif parallelism.sharing_rows > 1:
        uncounted.append(
            "communication of processes that share a row (`training.parallelism_config`)"
        )
    if (
        profile is not None
        and (profile.get("zero_optimization") or {}).get("zero_hpz_partition_size", 1) != 1
    ):
        uncounted.append("second copies of the weights (`zero_hpz_partition_size`)")
    return Setup(
        gpus=gpus,
        on_cpu=on_cpu,
        micro_batch=micro_batch,
        sequence_length=length,
        accumulation=accumulation,
        half=bool(training.get("bf16") or training.get("fp16")),
        weights_bytes=written or automatic,
        checkpointing=bool(
            training.get("gradient_checkpointing") or training.get("activation_checkpointing")
        ),
        fused_loss=recipe.model.fused_loss is True
        or recipe.model.fused_loss == "auto"
        and not on_cpu
        and not training.get("label_smoothing_factor"),
        packed=recipe.data.packing in ("best_fit", "concatenate", "sliding_window")
        or form_of_stage(recipe.stage) in MASKED_FORMS,
        attention=attention,
        optimizer=recipe.optimizer.name,
        lora=recipe.model.lora,
        zero=zero,
        tf32=bool(training.get("tf32")),
        recomputing=read_recomputing(training),
        rounding=recipe.optimizer.options.get("rounding"),
        releases=bool(recipe.optimizer.options.get("release_gradients", False)),
        needs=replace(needs, uncounted=tuple(uncounted)),
        nodes=nodes,
        batch_is_given=recipe.budget.global_batch_tokens is not None,
        scales_loss=bool(training.get("fp16")),
        compiles=compiles(
            recipe, zero3=zero is not None and zero.stage == 3 and not zero.is_fsdp, on_cpu=on_cpu
        )[0],
        from_scratch=recipe.model.from_scratch,
        train_only=recipe.model.train_only,
    )


def attention_on_gpu(recipe: Recipe, config: PreTrainedConfig) -> str:
    """Resolve `model.attention` on a GPU with flash kernels; custom functions are masked like sdpa."""
    wanted, training = recipe.model.attention, recipe.training
    if wanted != "auto":
        return "sdpa" if ":" in wanted else wanted
    half = (
        training.get("bf16")
        or training.get("fp16")
        or recipe.model.dtype in ("bfloat16", "float16")
    )
    padded = recipe.data.packing == "token_budget" or form_of_stage(recipe.stage) in MASKED_FORMS
    if not half or padded or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return "sdpa"
    model_class = cast(type[PreTrainedModel], MODEL_FOR_CAUSAL_LM_MAPPING[type(config)])
    return VARLEN if why_not_varlen(model_class, config) is None else "sdpa"


def read_deepspeed_sharding(profile: Mapping[str, Any]) -> Sharding | None:
    """Read the profile's ZeRO section with DeepSpeed's defaults; None at stage 0."""
    section = profile.get("zero_optimization") or {}
    stage = int(section.get("stage", 0))
    if stage == 0:
        return None
    values = {key.removeprefix("stage3_"): value for key, value in section.items()}
    names = {one.name for one in fields(Sharding) if type(one.default) is int}
    sizes: dict[str, Any] = {
        name: int(value)
        for name, value in values.items()
        if name in names and isinstance(value, int | float)
    }
    parts = {key: part for key, part in section.items() if isinstance(part, Mapping)}
    on_host = {key for key, part in parts.items() if part.get("device", "none") != "none"}
    return Sharding(
        stage,
        offload_optimizer="offload_optimizer" in on_host,
        offload_parameters="offload_param" in on_host,
        overlap_comm=bool(section.get("overlap_comm", stage == 3)),
        accumulates_in_fp32=(profile.get("data_types") or {}).get("grad_accum_dtype") == "fp32",
        **sizes,
    )


def read_fsdp_sharding(training: Mapping[str, Any]) -> Sharding | None:
    if not training.get("fsdp"):
        return None
    written, config = training.get("fsdp_config"), training.get("accelerator_config")
    written = written if isinstance(written, Mapping) else {}
    options = {str(key).removeprefix("fsdp_"): value for key, value in written.items()}
    accumulation = (
        config.get("gradient_accumulation_kwargs") if isinstance(config, Mapping) else None
    ) or {}
    return Sharding(
        3,
        is_fsdp=True,
        keeps_gathered=options.get("reshard_after_forward", True) is False,
        reduces_each_micro_batch=bool(accumulation.get("sync_each_batch")),
    )


def is_wrong_under_autocast(recipe: Recipe, capability: str | None) -> bool:
    """Whether compiled layers may be wrong: under autocast on an RTX 50 (seen in torch 2.13, open)."""
    training, model = recipe.training, recipe.model
    is_half = training.get("bf16") or training.get("fp16")
    if not (capability or "").startswith("12.") or not is_half:
        return False
    becomes_half = (
        model.dtype == "auto"
        and automatic_dtype(recipe, deepspeed=False, on_gpu=True).itemsize == 2
    )
    return model.lora is not None or not (becomes_half or model.dtype == "bfloat16")


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
    options = [training.get(f"{name}_kwargs") or {} for name in CHECKPOINTING]
    selective = any(one.get("selective") for one in options)
    writes = stage in KINDS and KINDS[stage].written is not None
    is_uneven = (
        writes or recipe.data.packing == "token_budget" or form_of_stage(stage) in MASKED_FORMS
    )
    tokens, each_step = recipe.budget.tokens, recipe.budget.global_batch_tokens
    is_short = tokens is not None and each_step is not None and tokens < FEWEST_STEPS * each_step
    reasons = {
        "it needs a GPU": on_cpu,
        UNEVEN: is_uneven,
        WRONG_UNDER_AUTOCAST: is_wrong_under_autocast(recipe, capability),
        UNDER_ZERO3: zero3,
        UNDER_FSDP: recomputes_hooks_of_fsdp(training),
        "processes share rows": read_parallelism(training).sharing_rows > 1,
        f"the run has fewer than {FEWEST_STEPS} steps": is_short,
        "it is not tested with quantized weights": bool((recipe.model.lora or {}).get("quantize")),
        "it is not tested with custom model code": recipe.model.trust_remote_code,
        "checkpoints are of torch's older kind (`use_reentrant`)": any(
            one.get("use_reentrant") for one in options
        ),
    }
    if model is not None:
        reasons |= {
            f"transformers does not mark decoder layers in {type(model).__name__}": not decoder_layers(
                model
            ),
            "the model has recurrent layers": runs_along_the_row(model),
            "`selective` does not work in compiled parts of layers with experts": selective
            and has_experts(model),
        }
    why_not = next((reason for reason, applies in reasons.items() if applies), None)
    return why_not is None, why_not or "the run is on a GPU"
