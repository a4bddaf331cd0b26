"""Change what an engine cannot do here, and keep what the run learns: the 4-bit base, the optimizer's method, the
adapter."""

from cpt.importing.engines import SHARED_ROWS, ZERO_1, ZERO_2_OFFLOAD, ZERO_3, ZERO_3_OFFLOAD, read_profile, section
from cpt.importing.ledger import Ledger, Verdict
from cpt.importing.passing import pass_on

EIGHT_BIT = ("adamw_8bit", "paged_adamw_8bit")
STAGES_THAT_GENERATE = ("grpo", "ppo")
STARTS_IN_THE_BASE = ("pissa", "olora")
WITHOUT_OFFLOAD = {ZERO_3_OFFLOAD: ZERO_3, ZERO_2_OFFLOAD: ZERO_1}
HALF = ("bf16", "bfloat16", "pure_bf16", "float16")
COMPILING = ("torch_compile", "torch_compile_backend", "torch_compile_mode")
WITH_CUDA_GRAPHS = ("max-autotune", "reduce-overhead")
"""Modes of torch.compile that cannot accumulate gradients over micro-batches."""


def resolve_conflicts(ledger: Ledger) -> None:
    """Make engine, optimizer, adapter and stage fit together; each change is entered for the key that asked for it."""
    resolve_engine(ledger)
    resolve_shared_rows(ledger)
    resolve_optimizer(ledger)
    resolve_precision(ledger)
    resolve_step(ledger)


def resolve_engine(ledger: Ledger) -> None:
    """Take ZeRO-3 where FSDP2 cannot do it, and no engine where neither can."""
    training, whole = ledger.recipe["training"], needs_whole_weights(ledger)
    if ledger.recipe["optimizer"]["name"] == "muon" or whole and profile_stage(training.get("deepspeed")) == 3:
        drop_engine(ledger, "deepspeed", f"{whole}: each GPU holds the whole model")
    why = why_not_fsdp(ledger)
    if "fsdp" not in training or not why:
        return
    if whole:
        drop_engine(ledger, "fsdp", f"{why}: each GPU holds the whole model")
        return
    profile = ZERO_3_OFFLOAD if training["fsdp_config"].get("cpu_offload") else ZERO_3
    drop_engine(
        ledger, "fsdp", f"training.deepspeed: {profile} (ZeRO-3), which splits the model too: {why}", "otherwise"
    )
    ledger.put("training.deepspeed", profile, f"ZeRO-3 in place of FSDP: {why}")


def needs_whole_weights(ledger: Ledger) -> str:
    """The reason why ZeRO-3 cannot split the weights; empty without one."""
    lora = ledger.recipe["model"].get("lora") or {}
    if lora.get("quantize"):
        return "4-bit weights are not split, and they are small"
    if ledger.recipe["optimizer"]["name"] == "muon":
        return "muon needs whole matrices"
    reads = lora.get("method", "lora") != "lora" or str(lora.get("init_lora_weights")).startswith(STARTS_IN_THE_BASE)
    return "the adapter reads whole weights" if reads else ""


def why_not_fsdp(ledger: Ledger) -> str:
    """The reason why FSDP2 cannot train this; empty without one."""
    stage, training, lora = ledger.recipe["stage"], ledger.recipe["training"], ledger.recipe["model"].get("lora") or {}
    if lora.get("quantize") or ledger.recipe["optimizer"]["name"] == "muon":
        return needs_whole_weights(ledger)
    if "parallelism_config" in training:
        return "rows are shared over GPUs by DeepSpeed"
    if stage in STAGES_THAT_GENERATE:
        return f"stage {stage} samples completions from the model"
    return "fp16 needs a loss scale" if training.get("fp16") else ""


def drop_engine(ledger: Ledger, engine: str, why: str, verdict: Verdict = "not") -> None:
    """Remove `training.fsdp` or `training.deepspeed`, if it is there."""
    if ledger.recipe["training"].pop(engine, None) is None:
        return
    ledger.recipe["training"].pop(f"{engine}_config", None)
    for key in (engine, *(("fsdp_config", "fsdp_version") if engine == "fsdp" else ())):
        ledger.revise(key, verdict, why)


def profile_stage(given: object) -> int | None:
    """The ZeRO stage of a profile; None if there is no profile or it does not say."""
    stage = section(read_profile(given), "zero_optimization").get("stage")
    return stage if isinstance(stage, int) else None


def resolve_shared_rows(ledger: Ledger) -> None:
    """GPUs share rows under ZeRO, in stages that learn the next token."""
    training = ledger.recipe["training"]
    if "parallelism_config" not in training:
        return
    parts, length = training["parallelism_config"]["sp_size"], ledger.recipe["data"]["sequence_length"]
    if not profile_stage(training.get("deepspeed")):
        why = (
            "rows are shared under ZeRO: write a profile as `training.deepspeed`, and `training.parallelism_config:"
            " {sp_size: N}`"
        )
    elif ledger.recipe["stage"] not in ("cpt", "pretrain", "sft"):
        why = f"the loss of stage {ledger.recipe['stage']} needs whole rows"
    elif length % parts:
        why = f"{parts} does not divide the {length:,} tokens of a row"
    else:
        return
    del training["parallelism_config"]
    for key in SHARED_ROWS:
        if (ledger.whole(key) or 1) > 1:
            ledger.revise(key, "not", why)


def resolve_optimizer(ledger: Ledger) -> None:
    """8-bit states are for whole parameters; only adamw keeps its states on the host."""
    training, name = ledger.recipe["training"], ledger.recipe["optimizer"]["name"]
    engine = "FSDP" if "fsdp" in training else "DeepSpeed" if "deepspeed" in training else ""
    if engine and name in EIGHT_BIT:
        told = f"optimizer.name: adamw: {engine} splits its states over the GPUs, and cannot split those in 8 bit"
        ledger.revise("optimizer" if ledger.tool == "axolotl" else "optim", "otherwise", told)
        ledger.put("optimizer.name", "adamw", f"{name} there; {engine} cannot split its states")
    elif name != "adamw" and str(training.get("deepspeed")) in WITHOUT_OFFLOAD:
        profile = WITHOUT_OFFLOAD[str(training["deepspeed"])]
        ledger.put("training.deepspeed", profile)
        ledger.revise(
            "deepspeed", "otherwise", f"training.deepspeed: {profile}: {name} cannot keep its states on the host"
        )


def resolve_precision(ledger: Ledger) -> None:
    """FSDP keeps fp32 weights, and computes with copies in half precision."""
    model = ledger.recipe["model"]
    if "fsdp" in ledger.recipe["training"] and model.pop("dtype", "float32") != "float32":
        ledger.put("training.bf16", True, "FSDP keeps fp32 weights and computes in bf16")
        for key in HALF:
            if ledger.is_on(key) or ledger.value(key) == "full":
                ledger.revise(key, "otherwise", "training.bf16: true; FSDP keeps fp32 weights and computes in bf16")


def resolve_step(ledger: Ledger) -> None:
    """What layers cannot be compiled with, and what offloaded activations need."""
    training = ledger.recipe["training"]
    zero3 = profile_stage(training.get("deepspeed")) == 3
    if zero3 and training.get("gradient_checkpointing_kwargs", {}).get("offload"):
        training["gradient_checkpointing"] = True
    recomputed = "fsdp" in training and training.get("gradient_checkpointing")
    if zero3 or recomputed or "parallelism_config" in training:
        where = "under ZeRO-3" if zero3 else "under FSDP with recomputation" if recomputed else "where GPUs share rows"
        for key in COMPILING:
            ledger.drop(key, f"layers are not compiled {where}; this changes only the speed")
    elif ledger.value("torch_compile_mode") in WITH_CUDA_GRAPHS:
        pass_on(ledger, "torch_compile_mode", value="max-autotune-no-cudagraphs")
