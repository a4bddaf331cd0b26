"""How the model is split over GPUs: DeepSpeed's profiles, FSDP, rows that GPUs share."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cpt.importing.ledger import EMPTY, OFF, Ledger, Verdict
from cpt.importing.passing import pass_on
from cpt.shipped import SHIPPED_FILES

PROFILES = "deepspeed_configs/"
FSDP_1 = ("sharding_strategy", "backward_prefetch", "forward_prefetch", "limit_all_gathers", "sync_module_states", "use_orig_params")
"""What the first version of FSDP has besides."""
FSDP_2 = {  # key there -> key of `training.fsdp_config`
    "reshard_after_forward": "reshard_after_forward",
    "offload_params": "cpu_offload",
    "auto_wrap_policy": "auto_wrap_policy",
    "transformer_layer_cls_to_wrap": "transformer_layer_cls_to_wrap",
    "min_num_params": "min_num_params",
}
OFFLOADING = {"ds_config_8b_24gb.json": "ds_config_production.json", "ds_config_prototype.json": "ds_config_zero1.json"}
"""Profiles that keep the optimizer's states on the host, and what splits the same without that."""
SHARED_ROWS = ("sequence_parallel_degree", "context_parallel_size", "cp_size")
NOT_SPLIT = {
    "tensor_parallel_size": "layers are not split over GPUs; ZeRO-3 or FSDP2 splits the model (docs/splitting.md)",
    **dict.fromkeys(("dp_replicate_size", "dp_shard_size"), "FSDP2 and ZeRO split the model over all processes"),
}
EIGHT_BIT = ("adamw_8bit", "paged_adamw_8bit")
STAGES_THAT_GENERATE = ("grpo", "ppo")
WITH_CUDA_GRAPHS = ("max-autotune", "reduce-overhead")
"""Modes of torch.compile that cannot accumulate gradients over micro-batches."""


def write_engines(ledger: Ledger) -> None:
    """DeepSpeed, FSDP and `parallelism_config`."""
    write_deepspeed(ledger)
    write_fsdp(ledger)
    ledger.skip_empty([*SHARED_ROWS, *NOT_SPLIT])
    for key in SHARED_ROWS:
        number = ledger.whole(key)
        if number is not None and number > 1:
            ledger.put("training.parallelism_config", {"sp_size": number}, key)
            ledger.otherwise(key, f"training.parallelism_config.sp_size: {number} (DeepSpeed Ulysses; ring attention there)")
        ledger.enter(key, "carried", "one GPU there, as here")
    for key, why in NOT_SPLIT.items():
        if (ledger.whole(key) or 1) > 1:
            ledger.drop(key, why)
        ledger.enter(key, "carried", "one GPU there, as here")
    resolve_conflicts(ledger)


def resolve_conflicts(ledger: Ledger) -> None:
    """Change what an engine cannot do here, and keep what the run learns: the 4-bit base, the optimizer's method, the adapter."""
    training, model = ledger.recipe["training"], ledger.recipe["model"]
    optimizer = ledger.recipe["optimizer"]["name"]
    quantized = bool((model.get("lora") or {}).get("quantize"))
    zero3_why = "4-bit weights are not split" if quantized else "the adapter reads whole weights" if is_read_whole(model.get("lora")) else ""
    fsdp_why = zero3_why if quantized else why_not_fsdp(ledger)
    if optimizer == "muon":
        zero3_why = fsdp_why = "muon needs whole matrices"
        drop_engine(ledger, "deepspeed", f"{zero3_why}: each GPU holds the whole model")
    if fsdp_why and zero3_why:
        drop_engine(ledger, "fsdp", f"{fsdp_why}: each GPU holds the whole model")
    elif fsdp_why and "fsdp" in training:
        profile = "ds_config_8b_24gb.json" if training["fsdp_config"].get("cpu_offload") else "ds_config_production.json"
        drop_engine(ledger, "fsdp", f"training.deepspeed: {PROFILES}{profile} (ZeRO-3) splits the model too: {fsdp_why}", "otherwise")
        ledger.put("training.deepspeed", PROFILES + profile, f"ZeRO-3 in place of FSDP: {fsdp_why}")
    if zero3_why and profile_stage(training.get("deepspeed")) == 3:
        drop_engine(ledger, "deepspeed", f"ZeRO-3: {zero3_why}. {PROFILES}ds_config_zero1.json splits what the adapter has")
    if "parallelism_config" in training and (why := why_no_shared_rows(ledger)):
        del training["parallelism_config"]
        for key in SHARED_ROWS:
            if (ledger.whole(key) or 1) > 1:
                ledger.revise(key, "not", why)
    if optimizer not in ("adamw", *EIGHT_BIT) and training.get("deepspeed") in [PROFILES + name for name in OFFLOADING]:
        ledger.put("training.deepspeed", PROFILES + OFFLOADING[training["deepspeed"].removeprefix(PROFILES)])
        ledger.revise("deepspeed", "otherwise", f"training.deepspeed: {training['deepspeed']}: {optimizer} cannot keep its states on the host")
    if profile_stage(training.get("deepspeed")) == 3:
        if not training["gradient_checkpointing"] and training.get("gradient_checkpointing_kwargs", {}).get("offload"):
            ledger.put("training.gradient_checkpointing", True, "offload under ZeRO-3 needs it")
        drop_compiling(ledger, "ZeRO-3 gathers parameters inside the layers, so they are not compiled")
    elif "parallelism_config" in training:
        drop_compiling(ledger, "layers are not compiled where GPUs share rows")
    elif training.get("gradient_accumulation_steps", 1) > 1 and ledger.value("torch_compile_mode") in WITH_CUDA_GRAPHS:
        pass_on(ledger, "torch_compile_mode", value="max-autotune-no-cudagraphs")
    engine = "FSDP" if "fsdp" in training else "DeepSpeed" if "deepspeed" in training else None
    if engine and optimizer in EIGHT_BIT:
        told = f"optimizer.name: adamw: {engine} splits its states over the GPUs, and cannot split those in 8 bit"
        ledger.revise("optimizer" if ledger.tool == "axolotl" else "optim", "otherwise", told)
        ledger.put("optimizer.name", "adamw", f"{optimizer} there; {engine} cannot split its states")
    if engine == "FSDP" and model.pop("dtype", "float32") != "float32":
        ledger.put("training.bf16", True, "FSDP keeps fp32 weights and computes in bf16")
        for key in ("bf16", "bfloat16", "pure_bf16", "float16"):
            if ledger.is_on(key):
                ledger.revise(key, "otherwise", "training.bf16: true; FSDP keeps fp32 weights and computes with half-precision copies")


def drop_engine(ledger: Ledger, engine: str, why: str, verdict: Verdict = "not") -> None:
    """Remove `training.fsdp` or `training.deepspeed` from the recipe, if it is there."""
    if ledger.recipe["training"].pop(engine, None) is None:
        return
    ledger.recipe["training"].pop(f"{engine}_config", None)
    for key in (engine, *(("fsdp_config", "fsdp_version") if engine == "fsdp" else ())):
        ledger.revise(key, verdict, why)


def drop_compiling(ledger: Ledger, why: str) -> None:
    """Leave out compiled layers, which only change the speed."""
    for key in ("torch_compile", "torch_compile_backend", "torch_compile_mode"):
        ledger.drop(key, why)


def is_read_whole(lora: Mapping[str, Any] | None) -> bool:
    """Whether the adapter reads the base's weights past the layers: ZeRO-3 has no whole ones there."""
    start = str((lora or {}).get("init_lora_weights"))
    return lora is not None and (lora.get("method", "lora") != "lora" or start.startswith(("pissa", "olora", "corda", "eva", "loftq")))


def why_not_fsdp(ledger: Ledger) -> str:
    """The reason why the recipe needs ZeRO-3 in place of FSDP2; empty without one."""
    stage, training = ledger.recipe["stage"], ledger.recipe["training"]
    if "parallelism_config" in training:
        return "rows are shared over GPUs by DeepSpeed"
    if stage in STAGES_THAT_GENERATE:
        return f"stage {stage} samples completions from the model"
    return "fp16 needs a loss scale" if training.get("fp16") else ""


def why_no_shared_rows(ledger: Ledger) -> str:
    """The reason why GPUs cannot share rows in this recipe; empty without one."""
    parts, length = ledger.recipe["training"]["parallelism_config"]["sp_size"], ledger.recipe["data"]["sequence_length"]
    if "deepspeed" not in ledger.recipe["training"]:
        return "rows are shared under ZeRO: write a profile as `training.deepspeed`, and `training.parallelism_config: {sp_size: N}`"
    if ledger.recipe["stage"] not in ("cpt", "pretrain", "sft"):
        return f"the loss of stage {ledger.recipe['stage']} needs whole rows"
    return f"{parts} does not divide the {length:,} tokens of a row" if length % parts else ""


def profile_stage(given: object) -> int | None:
    """The ZeRO stage of a profile; None if there is no profile or it does not say."""
    try:
        path = SHIPPED_FILES / str(given) if str(given).startswith(PROFILES) else Path(str(given))
        profile = json.loads(path.read_text(encoding="utf-8")) if isinstance(given, str) else given
        return int(profile["zero_optimization"]["stage"]) if isinstance(profile, Mapping) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write_deepspeed(ledger: Ledger) -> None:
    """A file that is here is taken as it is; one of the tool's own by what its name says."""
    given = ledger.value("deepspeed")
    ledger.skip_empty(["deepspeed"])
    if given is None or given is False or given == "":
        ledger.enter("deepspeed", "carried", OFF)
        return
    if isinstance(given, Mapping):
        ledger.put("training.deepspeed", dict(given), "cpt check compares it with the recipe")
        ledger.enter("deepspeed", "carried", "training.deepspeed")
        return
    path = Path(str(given))
    if path.is_file():
        ledger.put("training.deepspeed", str(path), "cpt check compares it with the recipe")
        ledger.enter("deepspeed", "carried", "training.deepspeed: the same file")
        return
    profile, why = profile_for(path.stem.lower())
    if profile is None:
        ledger.drop("deepspeed", f"there is no {path}, and {why}")
        return
    ledger.put("training.deepspeed", PROFILES + profile, f"{path.name} there: {why}")
    ledger.otherwise("deepspeed", f"training.deepspeed: {PROFILES}{profile}: {why}")


def profile_for(name: str) -> tuple[str | None, str]:
    """One of our profiles for a name like zero3_bf16_cpuoffload_all or ds_z2_offload_config."""
    stage = next((number for number in "0123" if f"zero{number}" in name or f"_z{number}" in name or name.startswith(f"z{number}")), None)
    offload = "offload" in name
    if stage == "3":
        return (
            ("ds_config_8b_24gb.json", "ZeRO-3, parameters and optimizer on the host")
            if offload
            else ("ds_config_production.json", "ZeRO-3")
        )
    if stage == "2":
        told = "ZeRO-2 without offload is ZeRO-1 here, which keeps gradients whole; ds_config_production.json (ZeRO-3) splits them too"
        return ("ds_config_prototype.json", "ZeRO-2, optimizer on the host") if offload else ("ds_config_zero1.json", told)
    if stage == "1":
        return "ds_config_zero1.json", "ZeRO-1"
    if stage == "0":
        return None, "ZeRO-0 splits nothing: start it with torchrun or accelerate without DeepSpeed"
    return None, f"its name does not say what it does. Put it there, or take one of {PROFILES}README.md as `training.deepspeed`"


def write_fsdp(ledger: Ledger) -> None:
    """FSDP2, with the keys that it has."""
    given, config = ledger.value("fsdp"), fsdp_section(ledger)
    ledger.skip_empty(["fsdp", "fsdp_config", "fsdp_version", "fsdp_final_state_dict_type"])
    if not given and not config:
        for key in ("fsdp", "fsdp_config", "fsdp_version", "fsdp_final_state_dict_type"):
            ledger.enter(key, "carried", OFF)
        return
    words = given if isinstance(given, list) else str(given or "").split()
    options: dict[str, Any] = {"version": 2}
    for key, value in config.items():
        options |= fsdp_option(ledger, f"fsdp_config.{key}", key.removeprefix("fsdp_"), value)
    if "offload" in words:
        options["cpu_offload"] = True
    ledger.put("training.fsdp", True, "FSDP2")
    ledger.put("training.fsdp_config", options)
    ledger.otherwise("fsdp", "training.fsdp: true, with fsdp_config.version 2 (docs/splitting.md)")
    ledger.otherwise("fsdp_version", "training.fsdp_config.version: 2")
    if not config:
        ledger.otherwise("fsdp_config", "training.fsdp_config")
    ledger.otherwise("fsdp_final_state_dict_type", "the export is always a whole model")


def fsdp_section(ledger: Ledger) -> dict[str, Any]:
    """`fsdp_config`, which may be a file of its own.

    Raises:
        RecipeError: it is neither keys with values nor such a file.
    """
    given = ledger.value("fsdp_config")
    if not isinstance(given, str) or given.lstrip().startswith("{"):
        return ledger.section("fsdp_config")
    if not given.endswith(".json"):
        raise ledger.unlike("fsdp_config", "keys with values, or a JSON file", given)
    ledger.drop("fsdp_config", f"its keys are in {given}: write them below `fsdp_config`, and import it again")
    return {"version": 2}


def fsdp_option(ledger: Ledger, key: str, name: str, value: Any) -> dict[str, Any]:
    """What one of its keys comes to in ours, where it comes to something there."""
    if value is None:
        ledger.enter(key, "carried", EMPTY)
    elif name in ("version", "state_dict_type", "final_state_dict_type"):
        ledger.otherwise(key, "FSDP2, which writes whole models and checkpoints in parts by itself")
    elif name == "activation_checkpointing":
        if value:
            ledger.put("training.gradient_checkpointing", True)
        ledger.otherwise(key, f"training.gradient_checkpointing: {str(bool(value)).lower()}")
    elif name == "cpu_ram_efficient_loading":
        ledger.otherwise(key, "each process builds the model and keeps its part; ZeRO-3 builds it in parts")
    elif name in FSDP_2:
        ledger.enter(key, "carried", f"training.fsdp_config.{FSDP_2[name]}")
        return {FSDP_2[name]: value}
    else:
        ledger.drop(key, "of the first FSDP; FSDP2 has no such switch" if name in FSDP_1 else "`training.fsdp_config` has no such key")
    return {}
