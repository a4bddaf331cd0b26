"""What of a recipe decides how much memory its run takes."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self, cast

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel

from cpt.data.readers.forms import form_of_stage
from cpt.models.recomputing import Recomputing, read_recomputing
from cpt.models.varlen_attention import VARLEN, why_not_varlen
from cpt.optim.adamw import automatic_dtype
from cpt.parallelism import read_parallelism
from cpt.planner.compiling import compiles
from cpt.planner.stages import MASKED_FORMS, Beside, beside_of
from cpt.recipe.schema import Recipe

BUCKET = 500_000_000  # elements; DeepSpeed's own defaults, where a profile leaves them out
PREFETCH, SUB_GROUP, LIVE = 50_000_000, 1_000_000_000, 1_000_000_000


@dataclass(frozen=True)
class Zero:
    """The ZeRO part of a DeepSpeed profile; sizes in elements."""

    stage: int
    offload_optimizer: bool = False
    offload_parameters: bool = False
    overlap_comm: bool = True
    reduce_bucket: int = BUCKET
    allgather_bucket: int = BUCKET
    prefetch_bucket: int = PREFETCH
    max_live: int = LIVE
    max_reuse_distance: int = LIVE
    sub_group: int = SUB_GROUP
    secondary: int = 1
    """GPUs that hold a second copy of the weights among them, for the backward pass (`zero_hpz_partition_size`)."""
    quantized_weights: bool = False
    """Gathered in 8 bit."""
    quantized_gradients: bool = False
    """Brought together in 4 bit."""
    accumulates_in_fp32: bool = False
    """Gradients of several micro-batches (`data_types.grad_accum_dtype`)."""
    is_fsdp: bool = False
    """torch's FSDP2 in DeepSpeed's place, which divides the same things."""
    keeps_gathered: bool = False
    """Of FSDP2: weights stay whole from the forward to the backward pass (`reshard_after_forward: false`)."""
    reduces_each_micro_batch: bool = False
    """Of FSDP2: gradients are reduced and divided after each micro-batch, not only after a step's last
    (`sync_each_batch`)."""


@dataclass(frozen=True)
class Setup:
    """A way to run a recipe."""

    gpus: int
    """Processes, each with a GPU of its own, or all on the CPU."""
    on_cpu: bool
    micro_batch: int
    """Rows that a process takes at once."""
    sequence_length: int
    accumulation: int
    """Micro-batches in a step."""
    half: bool
    """Computes in bf16 or fp16."""
    weights_bytes: int
    """Of one weight that is not trained by itself, or of the copy that the layers compute with."""
    checkpointing: bool
    fused_loss: bool
    """Asked for, or on a GPU where nothing was said; `logits.fuses` knows whether the model allows it."""
    packed: bool
    """Rows bring a mask where attention is not flash's: of several documents that are kept apart, or of padding."""
    attention: str
    optimizer: str
    lora: Mapping[str, Any] | None
    zero: Zero | None
    tf32: bool = False
    """What is not half goes through tensor cores."""
    recomputing: Recomputing = Recomputing()
    """Which layers are computed again under checkpointing, and where what is kept waits."""
    rounding: str | None = None
    """Of bfloat16 weights that have no master copy."""
    releases: bool = False
    """Each gradient is used and dropped as soon as it is there."""
    beside: Beside = Beside()
    """What the stage holds and makes besides."""
    nodes: int = 1
    """Machines, each with as many of the GPUs."""
    batch_is_given: bool = False
    """The recipe says the tokens of a step, and accumulation follows from them."""
    scales_loss: bool = False
    """Computes in fp16."""
    compiles: bool = False
    """Layers are compiled."""
    from_scratch: bool = False
    """There are no trained weights that adapters could stand beside."""

    @property
    def gpus_per_node(self) -> int:
        """Of each machine."""
        return self.gpus // self.nodes

    @property
    def as_computed(self) -> Self:
        """With the weights as layers see them: FSDP2 gathers them in the precision that computes."""
        is_cast = self.zero is not None and self.zero.is_fsdp and self.half
        return replace(self, weights_bytes=2) if is_cast else self

    @property
    def sequences(self) -> int:
        """That go through the model at once, on each process."""
        return self.micro_batch * self.beside.sequences

    @property
    def length(self) -> int:
        """Tokens of the longest sequence: a row, and what the model itself adds to it."""
        return self.sequence_length + self.beside.completion

    @property
    def tokens_at_once(self) -> int:
        """On each process."""
        return self.sequences * self.length

    @property
    def sampled(self) -> int:
        """Completions that a process samples at once."""
        return self.beside.sampled(self.micro_batch, self.accumulation, self.gpus)

    @property
    def precision(self) -> str:
        """Of the matrix products: `half`, `tf32` or `fp32`."""
        return "half" if self.half else "tf32" if self.tf32 else "fp32"

    @property
    def rows_at_once(self) -> int:
        """Over all processes."""
        return self.gpus * self.micro_batch

    @property
    def tokens_per_step(self) -> int:
        """Over all processes, as the budget counts them: each row as `sequence_length`."""
        return self.rows_at_once * self.accumulation * self.sequence_length


def setup_of(
    recipe: Recipe,
    gpus: int,
    profile: Mapping[str, Any] | None,
    *,
    attention: str,
    on_cpu: bool = False,
    nodes: int = 1,
) -> Setup:
    """Read it from the recipe.

    Args:
        gpus: processes; where the recipe gives a global batch, accumulation follows from them.
        profile: the DeepSpeed profile's content.
        attention: what `model.attention: auto` means there; on a GPU, `attention_on_gpu`.
        nodes: machines that hold them.

    Raises:
        CptError: see `beside_of`.
    """
    training = recipe.training
    length = recipe.data.sequence_length // read_parallelism(training).sp_size  # what a process has of a row
    micro_batch = int(training.get("per_device_train_batch_size", 8))
    accumulation = int(training.get("gradient_accumulation_steps", 1))
    if recipe.budget.global_batch_tokens is not None:
        accumulation = max(1, round(recipe.budget.global_batch_tokens / (micro_batch * gpus * length)))
    half = bool(training.get("bf16") or training.get("fp16"))
    zero = zero_of(profile) if profile is not None else fsdp_of(training)
    written = {"float32": 4, "bfloat16": 2, "float16": 2}.get(recipe.model.dtype)
    automatic = automatic_dtype(recipe, deepspeed=profile is not None, on_gpu=not on_cpu).itemsize
    if training.get("fp16") and profile is not None:
        automatic = 2  # the engine rounds what it is given
    return Setup(
        gpus=gpus,
        on_cpu=on_cpu,
        micro_batch=micro_batch,
        sequence_length=length,
        accumulation=accumulation,
        half=half,
        weights_bytes=written or automatic,
        checkpointing=bool(training.get("gradient_checkpointing") or training.get("activation_checkpointing")),
        fused_loss=recipe.model.fused_loss is True or recipe.model.fused_loss == "auto" and not on_cpu,
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
        beside=with_sharing(beside_of(recipe), training),
        nodes=nodes,
        batch_is_given=recipe.budget.global_batch_tokens is not None,
        scales_loss=bool(training.get("fp16")),
        compiles=compiles(recipe, zero3=zero is not None and zero.stage == 3 and not zero.is_fsdp, on_cpu=on_cpu)[0],
        from_scratch=recipe.model.from_scratch,
    )


def with_sharing(beside: Beside, training: Mapping[str, Any]) -> Beside:
    """What processes that share rows send each other is told as left out; so is all else that sharing changes beside a
    row's length."""
    sharing = read_parallelism(training)
    if sharing.sharing_rows == 1:
        return beside
    what = "what processes that share a row send each other"
    if sharing.sharing_rows > sharing.sp_size:
        what = "tensor and context parallelism: the plan is of processes that hold whole layers and rows of their own"
    return replace(beside, uncounted=(*beside.uncounted, f"{what} (`training.parallelism_config`)"))


def attention_on_gpu(recipe: Recipe, config: PreTrainedConfig) -> str:
    """What `model.attention` comes to on a GPU that flash kernels are for; users' functions are masked like sdpa."""
    wanted, training = recipe.model.attention, recipe.training
    if wanted != "auto":
        return "sdpa" if ":" in wanted else wanted
    half = training.get("bf16") or training.get("fp16") or recipe.model.dtype in ("bfloat16", "float16")
    padded = recipe.data.packing == "token_budget" or form_of_stage(recipe.stage) in MASKED_FORMS
    if not half or padded or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return "sdpa"
    model_class = cast(type[PreTrainedModel], MODEL_FOR_CAUSAL_LM_MAPPING[type(config)])
    return VARLEN if why_not_varlen(model_class, config) is None else "sdpa"


def zero_of(profile: Mapping[str, Any]) -> Zero | None:
    """The profile's ZeRO part with DeepSpeed's defaults; None at stage 0."""
    section = profile.get("zero_optimization") or {}
    stage = int(section.get("stage", 0))
    if stage == 0:
        return None

    def size(default: int, *names: str) -> int:
        written = next((section[name] for name in names if isinstance(section.get(name), int | float)), default)
        return int(written)

    return Zero(
        stage=stage,
        offload_optimizer=is_on_host(section, "offload_optimizer"),
        offload_parameters=is_on_host(section, "offload_param"),
        overlap_comm=bool(section.get("overlap_comm", stage == 3)),
        reduce_bucket=size(BUCKET, "reduce_bucket_size"),
        allgather_bucket=size(BUCKET, "allgather_bucket_size"),
        prefetch_bucket=size(PREFETCH, "stage3_prefetch_bucket_size", "prefetch_bucket_size"),
        max_live=size(LIVE, "stage3_max_live_parameters", "max_live_parameters"),
        max_reuse_distance=size(LIVE, "stage3_max_reuse_distance", "max_reuse_distance"),
        sub_group=size(SUB_GROUP, "sub_group_size"),
        secondary=max(1, size(1, "zero_hpz_partition_size")) if stage == 3 else 1,
        quantized_weights=stage == 3 and bool(section.get("zero_quantized_weights", False)),
        quantized_gradients=stage == 3 and bool(section.get("zero_quantized_gradients", False)),
        accumulates_in_fp32=(profile.get("data_types") or {}).get("grad_accum_dtype") == "fp32",
    )


def fsdp_of(training: Mapping[str, Any]) -> Zero | None:
    """What `training.fsdp` divides; None without it."""
    if not training.get("fsdp"):
        return None
    written = training.get("fsdp_config") or {}
    options = (
        {str(key).removeprefix("fsdp_"): value for key, value in written.items()}
        if isinstance(written, Mapping)
        else {}
    )
    config = training.get("accelerator_config")
    accumulation = (config.get("gradient_accumulation_kwargs") if isinstance(config, Mapping) else None) or {}
    return Zero(
        3,
        is_fsdp=True,
        keeps_gathered=options.get("reshard_after_forward", True) is False,
        reduces_each_micro_batch=bool(accumulation.get("sync_each_batch")),
    )


def is_on_host(section: Mapping[str, Any], key: str) -> bool:
    """Whether a part lies in host memory (or on a disk)."""
    part = section.get(key)
    return isinstance(part, Mapping) and part.get("device", "none") != "none"
