"""Replace what cpt refuses together. The stage, the adapter and the optimizer's method stay; the engine, 8-bit states
and compilation give way."""

from cpt.importing.trainer_keys import ZERO_1, ZERO_2_OFFLOAD, ZERO_3, ZERO_3_OFFLOAD
from cpt.importing.translation import Translation
from cpt.stages.deepspeed_profile import read_profile

WITHOUT_OFFLOAD = {ZERO_3_OFFLOAD: ZERO_3, ZERO_2_OFFLOAD: ZERO_1}
STAGES = {ZERO_1: 1, ZERO_2_OFFLOAD: 2, ZERO_3: 3, ZERO_3_OFFLOAD: 3}
CUDA_GRAPHS = ("max-autotune", "reduce-overhead")


def resolve_conflicts(config: Translation) -> None:
    """Make them fit together; what gives way is listed as not translated."""
    model, training, name = config.recipe["model"], config.recipe["training"], config.recipe["optimizer"]["name"]
    if model.get("from_scratch") and model.pop("lora", None) is not None:
        config.drop("adapter", "lora", "an adapter needs trained weights, and these are new")
    is_4_bit = bool((model.get("lora") or {}).get("quantize"))
    if name == "muon" or is_4_bit and ("fsdp" in training or zero_stage(config) == 3):
        why = "muon needs whole matrices" if name == "muon" else "4-bit weights cannot be sharded"
        drop_engine(config, f"{why}: each GPU holds the whole model")
    elif "fsdp" in training and (training.get("fp16") or config.recipe["stage"] in ("grpo", "ppo")):
        offload = training["fsdp_config"].get("cpu_offload")
        drop_engine(config, "ZeRO-3 instead: FSDP2 has no loss scale for fp16, and does not generate")
        config.put("training.deepspeed", ZERO_3_OFFLOAD if offload else ZERO_3)
    if "8bit" in name and ("fsdp" in training or "deepspeed" in training):
        config.put("optimizer.name", "adamw")
        config.drop("optim", name, "adamw instead: 8-bit states cannot be sharded")
    elif name != "adamw" and str(training.get("deepspeed")) in WITHOUT_OFFLOAD:
        config.put(
            "training.deepspeed", WITHOUT_OFFLOAD[training["deepspeed"]], f"no offload: it needs adamw, not {name}"
        )
    if "fsdp" in training and model.pop("dtype", None):
        config.drop("bf16", "full", "FSDP keeps fp32 weights and computes in bf16")
    resolve_compilation(config)


def drop_engine(config: Translation, why: str) -> None:
    """Remove DeepSpeed or FSDP."""
    for key in ("deepspeed", "fsdp"):
        config.recipe["training"].pop(f"{key}_config", None)
        if value := config.recipe["training"].pop(key, None):
            config.drop(key, value, why)


def resolve_compilation(config: Translation) -> None:
    """Layers are not compiled under ZeRO-3, nor under FSDP with recomputation; CUDA graphs do not accumulate."""
    training = config.recipe["training"]
    if zero_stage(config) == 3 and "offload" in training.get("gradient_checkpointing_kwargs", {}):
        training["gradient_checkpointing"] = True
    recomputes = training["gradient_checkpointing"]
    for key in ("torch_compile", "torch_compile_backend", "torch_compile_mode"):
        value = config.values.get(key)
        if value is not None and (zero_stage(config) == 3 or "fsdp" in training and recomputes):
            config.drop(key, config.take(key), "layers are not compiled under this engine")
        elif value in CUDA_GRAPHS:
            config.values[key] = "max-autotune-no-cudagraphs"


def zero_stage(config: Translation) -> int:
    """The ZeRO stage of the recipe; 0 without DeepSpeed."""
    given = config.recipe["training"].get("deepspeed")
    if given is None or str(given) in STAGES:
        return STAGES.get(str(given), 0)
    return int(read_profile(given).get("zero_optimization", {}).get("stage", 0))
