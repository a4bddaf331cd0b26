"""How the model is split over GPUs: DeepSpeed's profiles, FSDP, rows that GPUs share."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cpt.importing.ledger import EMPTY, OFF, Ledger
from cpt.shipped import SHIPPED_FILES

PROFILES = "deepspeed_configs/"
ZERO_1, ZERO_2_OFFLOAD, ZERO_3, ZERO_3_OFFLOAD = (
    PROFILES + f"ds_config_{name}.json" for name in ("zero1", "prototype", "production", "8b_24gb")
)
FSDP_1 = (
    "sharding_strategy",
    "backward_prefetch",
    "forward_prefetch",
    "limit_all_gathers",
    "sync_module_states",
    "use_orig_params",
)
"""What the first version of FSDP has besides."""
FSDP_2 = {  # key there -> key of `training.fsdp_config`
    "reshard_after_forward": "reshard_after_forward",
    "offload_params": "cpu_offload",
    "auto_wrap_policy": "auto_wrap_policy",
    "transformer_layer_cls_to_wrap": "transformer_layer_cls_to_wrap",
    "min_num_params": "min_num_params",
}
SHARED_ROWS = ("sequence_parallel_degree", "context_parallel_size", "cp_size")
NOT_SPLIT = {
    "tensor_parallel_size": "layers are not split over GPUs; ZeRO-3 or FSDP2 splits the model (docs/splitting.md)",
    **dict.fromkeys(("dp_replicate_size", "dp_shard_size"), "FSDP2 and ZeRO split the model over all processes"),
}


def write_engines(ledger: Ledger) -> None:
    """DeepSpeed, FSDP and `parallelism_config`."""
    write_deepspeed(ledger)
    write_fsdp(ledger)
    ledger.skip_empty([*SHARED_ROWS, *NOT_SPLIT])
    for key in SHARED_ROWS:
        number = ledger.whole(key)
        if number is not None and number > 1:
            ledger.put("training.parallelism_config", {"sp_size": number}, key)
            ledger.otherwise(
                key, f"training.parallelism_config.sp_size: {number} (DeepSpeed Ulysses; ring attention there)"
            )
        ledger.enter(key, "carried", "one GPU there, as here")
    for key, why in NOT_SPLIT.items():
        if (ledger.whole(key) or 1) > 1:
            ledger.drop(key, why)
        ledger.enter(key, "carried", "one GPU there, as here")


def write_deepspeed(ledger: Ledger) -> None:
    """A file that is here is taken as it is; one of the tool's own by what its name says."""
    given = ledger.value("deepspeed")
    ledger.skip_empty(["deepspeed"])
    if given is None or given is False or given == "":
        ledger.enter("deepspeed", "carried", OFF)
        return
    path = Path(str(given))
    if isinstance(given, Mapping) or path.is_file():
        write_own_profile(ledger, given)
        return
    profile, why = profile_for(path.stem.lower())
    if profile is None:
        ledger.drop("deepspeed", f"there is no {path}, and {why}")
        return
    ledger.put("training.deepspeed", PROFILES + profile, f"{path.name} there: {why}")
    ledger.otherwise("deepspeed", f"training.deepspeed: {PROFILES}{profile}: {why}")


def write_own_profile(ledger: Ledger, given: Any) -> None:
    """A profile of the user's, with the one key added that `cpt check` asks for."""
    profile = read_profile(given)
    offload = section(section(profile, "zero_optimization"), "offload_optimizer")
    if offload.get("device", "none") != "none" and profile.get("zero_force_ds_cpu_optimizer", True):
        profile["zero_force_ds_cpu_optimizer"] = False
        ledger.put("training.deepspeed", profile, "keeps the optimizer of this recipe; cpt check compares the rest")
        ledger.otherwise(
            "deepspeed",
            "training.deepspeed, with zero_force_ds_cpu_optimizer: false, which keeps the recipe's optimizer",
        )
        return
    ledger.put(
        "training.deepspeed",
        dict(given) if isinstance(given, Mapping) else str(given),
        "cpt check compares it with the recipe",
    )
    ledger.enter("deepspeed", "carried", "training.deepspeed")


def section(profile: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The keys below a key; empty if it has none."""
    found = profile.get(key)
    return found if isinstance(found, Mapping) else {}


def read_profile(given: Any) -> dict[str, Any]:
    """The content of a DeepSpeed profile; empty if it cannot be read, which `cpt check` reports."""
    try:
        path = SHIPPED_FILES / str(given) if str(given).startswith(PROFILES) else Path(str(given))
        profile = given if isinstance(given, Mapping) else json.loads(path.read_text(encoding="utf-8"))
        return dict(profile)
    except (OSError, ValueError, TypeError):
        return {}


def profile_for(name: str) -> tuple[str | None, str]:
    """One of our profiles for a name like zero3_bf16_cpuoffload_all or ds_z2_offload_config."""
    stage = next(
        (
            number
            for number in "0123"
            if f"zero{number}" in name or f"_z{number}" in name or name.startswith(f"z{number}")
        ),
        None,
    )
    offload = "offload" in name
    if stage == "3":
        return (
            ("ds_config_8b_24gb.json", "ZeRO-3, parameters and optimizer on the host")
            if offload
            else ("ds_config_production.json", "ZeRO-3")
        )
    if stage == "2":
        told = (
            "ZeRO-2 without offload is ZeRO-1 here, which keeps gradients whole; ds_config_production.json (ZeRO-3)"
            " splits them too"
        )
        return (
            ("ds_config_prototype.json", "ZeRO-2, optimizer on the host")
            if offload
            else ("ds_config_zero1.json", told)
        )
    if stage == "1":
        return "ds_config_zero1.json", "ZeRO-1"
    if stage == "0":
        return None, "ZeRO-0 splits nothing: start it with torchrun or accelerate without DeepSpeed"
    return (
        None,
        (
            f"its name does not say what it does. Put it there, or take one of {PROFILES}README.md as"
            " `training.deepspeed`"
        ),
    )


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
        ledger.drop(
            key,
            (
                "of the first FSDP; FSDP2 has no such switch"
                if name in FSDP_1
                else "`training.fsdp_config` has no such key"
            ),
        )
    return {}
