"""The base model, its type and attention, and the adapter: what both tools say of them in words of their own."""

import re
from collections.abc import Mapping
from typing import Any

from cpt.importing.ledger import OFF, Ledger
from cpt.importing.passing import fitted, kinds_in_words
from cpt.recipe.huggingface_keys import keys_of_config
from cpt.recipe.peft_methods import config_of_method

COMMIT = re.compile(r"[0-9a-f]{40}")
BF16_WEIGHTS = "Updates are made in fp32 (docs/optimizers.md); axolotl makes them in bfloat16 where all weights learn"
FLASH = "auto takes FlashAttention's kernels, or torch's own of that kind, where the GPU has them and they are right"
ATTENTION = {
    "eager": "eager",
    "sdpa": "sdpa",
    "flex_attention": "flex_attention",
    "auto": "auto",
    "disabled": "eager",
}
"""What `model.attention` may be, by the names that both tools have for it."""
LIKE_FLASH = ("fa2", "fa3")


def write_attention(ledger: Ledger, key: str, name: str) -> None:
    """`model.attention`."""
    if name in ATTENTION:
        ledger.put("model.attention", ATTENTION[name], key if ATTENTION[name] != name else "")
        ledger.enter(key, "carried", f"model.attention: {ATTENTION[name]}")
    elif name in LIKE_FLASH or "flash" in name:
        ledger.put("model.attention", "auto", f"{key}: {name}")
        ledger.otherwise(key, f"model.attention: auto. {FLASH}")
    else:
        ledger.drop(key, f"there is no `{name}` here; `model.attention: auto` takes the fastest that is right")


def write_trust(ledger: Ledger) -> None:
    """Code from the Hub runs only where it is pinned to a commit."""
    ledger.skip_empty(["trust_remote_code"])
    if not ledger.is_on("trust_remote_code"):
        ledger.enter("trust_remote_code", "carried", OFF)
    elif COMMIT.fullmatch(ledger.recipe["model"].get("revision", "")):
        ledger.carry("trust_remote_code", "model.trust_remote_code", True)
    else:
        told = (
            "code of the Hub runs only if it is pinned: set `model.revision` to a commit you have read, and"
            " `model.trust_remote_code: true`"
        )
        ledger.drop("trust_remote_code", f"{told}. Most models need none")


def write_precision(ledger: Ledger) -> None:
    """bf16, fp16 and tf32."""
    keys = ("bf16", "fp16", "tf32", "bfloat16", "float16", "float32", "pure_bf16")
    ledger.skip_empty(keys)
    wanted = ledger.value("bf16")
    is_brain = wanted == "full" or ledger.is_on("bf16")
    if ledger.is_on("fp16") and (wanted == "auto" or not is_brain):
        ledger.put("training.fp16", True)
        ledger.enter("fp16", "carried", "training.fp16")
        ledger.otherwise("bf16", "fp16 decides")
    elif is_brain or ledger.is_on("pure_bf16"):
        ledger.put("training.bf16", True, "bf16: auto" if wanted == "auto" else "")
        write_bf16(ledger, wanted)
    ledger.enter("bf16", "carried", OFF)
    ledger.enter(
        "fp16", "otherwise" if ledger.is_on("fp16") else "carried", "bf16 decides" if ledger.is_on("fp16") else OFF
    )
    if ledger.is_on("tf32"):
        ledger.carry("tf32", "training.tf32", True)
    ledger.enter("tf32", "carried", OFF)
    for key, dtype in {
        "bfloat16": "bfloat16",
        "pure_bf16": "bfloat16",
        "float16": "float16",
        "float32": "float32",
    }.items():
        if ledger.is_on(key):
            ledger.carry(key, "model.dtype", dtype)
        ledger.enter(key, "carried", OFF)


def write_bf16(ledger: Ledger, wanted: object) -> None:
    """What bf16 means for the weights: axolotl has no fp32 ones beside them where all learn."""
    told = ["training.bf16", *(["on a GPU without it, write fp16"] if wanted == "auto" else [])]
    if wanted == "full":
        ledger.put("model.dtype", "bfloat16", "bf16: full")
        told.append("model.dtype: bfloat16")
    elif ledger.tool == "axolotl" and "lora" not in ledger.recipe["model"]:
        told.append(BF16_WEIGHTS)
    ledger.enter("bf16", "carried" if len(told) == 1 else "otherwise", "; ".join(told))


def write_checkpointing(ledger: Ledger, *, on: bool, comment: str = "", offload: str = "") -> None:
    """Whether activations are recomputed, and how.

    Args:
        offload: the key that asks for them to wait in host memory; empty without one.
    """
    ledger.put("training.gradient_checkpointing", on, comment)
    options = ledger.section("gradient_checkpointing_kwargs") if on else {}
    ledger.skip_empty(["gradient_checkpointing_kwargs"])
    if options:
        ledger.enter("gradient_checkpointing_kwargs", "carried", "training.gradient_checkpointing_kwargs")
    if offload:
        options |= {"offload": True}
        ledger.otherwise(offload, "training.gradient_checkpointing_kwargs: {offload: true}, to host memory")
    if options:
        ledger.put("training.gradient_checkpointing_kwargs", options, offload)
    ledger.otherwise("gradient_checkpointing_kwargs", "nothing is recomputed")


def write_liger(ledger: Ledger, keys: list[str], kernels: dict[str, bool]) -> None:
    """Liger's kernels where the stage can use them.

    Args:
        keys: what of the config asks for them.
        kernels: which of them, by Liger's own names; all where it is empty.
    """
    stage = ledger.recipe["stage"]
    if stage not in ("cpt", "pretrain", "sft"):
        for key in keys:
            ledger.otherwise(key, f"stage `{stage}` reads log-probabilities without whole logits by itself")
        return
    ledger.put("training.use_liger_kernel", True, "" if "use_liger_kernel" in keys else keys[0])
    if kernels:
        ledger.put("training.liger_kernel_config", kernels)
    for key in keys:
        ledger.enter(key, "carried", "training.use_liger_kernel" + (" and .liger_kernel_config" if kernels else ""))


def write_adapter(ledger: Ledger, options: dict[str, Any], keys: Mapping[str, str]) -> None:
    """`model.lora`, as far as peft takes what the config says.

    Args:
        keys: key of the config -> option of peft.
    """
    ledger.skip_empty(keys)
    known = keys_of_config(config_of_method(options))
    for key, option in keys.items():
        if option in options and (value := fitted(options[option], known[option])) is None:
            del options[option]
            ledger.drop(key, f"`model.lora.{option}` must be {kinds_in_words(known[option])}")
        elif option in options:
            options[option] = value
        ledger.enter(key, "carried", f"model.lora.{option}" if option in options else "model.lora")
    ledger.put("model.lora", options)


def starts_from_weights(ledger: Ledger, keys: list[str], adapter: str) -> bool:
    """Whether there is something to adapt."""
    if not ledger.recipe["model"].get("from_scratch"):
        return True
    ledger.drop(adapter, "an adapter adapts trained weights, and these are new: all parameters learn")
    without_adapter(ledger, keys)
    return False


def without_adapter(ledger: Ledger, keys: list[str]) -> None:
    """Options of an adapter that there is not."""
    ledger.skip_empty(keys)
    for key in keys:
        if not ledger.value(key):
            ledger.enter(key, "carried", OFF)
        ledger.otherwise(key, "no effect there: no adapter is trained")


def targets(value: Any) -> list[str] | str:
    """Names of layers from a list, or from a text with commas; `all` and regular expressions stay texts."""
    if isinstance(value, list):
        return [str(name) for name in value]
    text = str(value).strip()
    if text in ("all", "all-linear", "all_linear"):
        return "all-linear"
    is_pattern = bool(set(text) & set("|*^$()[]\\"))
    return text if is_pattern else [name.strip() for name in text.split(",") if name.strip()]
