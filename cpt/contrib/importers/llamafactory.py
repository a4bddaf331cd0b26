"""Translate a LLaMA-Factory config to a recipe: its usual form, and that of its v1."""

from pathlib import Path
from typing import Any

from cpt.contrib.importers.translation import (
    LORA,
    MULTIMODAL,
    Translation,
    is_on,
    translate_shared_keys,
    words_in,
)
from cpt.plugins import did_you_mean
from cpt.recipe.tree import Mistakes, plain, read_or_raise, shown_path

V1_KEYS = ("train_dataset", "model_class", "peft_config", "dist_config")
KEYS = ("model_name_or_path", *V1_KEYS)  # each identifies a config
RENAMED = {  # to names in Hugging Face's classes
    "finetuning_type": "adapter",
    "lora_rank": "r",
    "lora_target": "target_modules",
    "additional_target": "modules_to_save",
    "flash_attn": "attn_implementation",
    "cutoff_len": "sequence_length",
    "pref_beta": "beta",
    "dpo_label_smoothing": "label_smoothing",
    "kto_chosen_weight": "desirable_weight",
    "kto_rejected_weight": "undesirable_weight",
}
DEFAULTS = {
    "stage": "sft",
    "adapter": "lora",
    "sequence_length": 2048,
    "per_device_train_batch_size": 8,
    "num_train_epochs": 3,
    "learning_rate": 5e-5,
    "lr_scheduler_type": "linear",
    "save_steps": 500,
    "gradient_checkpointing": True,
}
V1_RENAMED = {
    "model": "model_name_or_path",
    "micro_batch_size": "per_device_train_batch_size",
    "enable_activation_checkpointing": "gradient_checkpointing",
    "peft_config.name": "adapter",
    **{f"peft_config.{option}": option for option in LORA},
    "quant_config.quantization_bit": "quantization_bit",
    "dist_config.config_file": "deepspeed",
}
V1_DEFAULTS = {
    "adapter": "full",
    "per_device_train_batch_size": 1,
    "learning_rate": 1e-4,
    "weight_decay": 0.01,
    "lr_scheduler_type": "constant",
    "bf16": True,
}
LORA_DEFAULTS = {"r": 8, "target_modules": "all"}
STAGES = {"pt": "cpt", "sft": "sft", "rm": "reward", "ppo": "ppo", "dpo": "dpo", "kto": "kto"}
PREFERENCES = ("dpo", "reward", "orpo", "cpo")
VISION = ("freeze_vision_tower", "freeze_multi_modal_projector")
INFO = "dataset_info.json"
Info = tuple[dict[str, Any], Path]  # name -> dataset, and the folder of their files


def translate(config: Translation) -> None:
    config.refuse(dict.fromkeys(VISION, MULTIMODAL))
    info = flatten_v1(config) if config.values.keys() & {*V1_KEYS} else None
    config.rename(RENAMED)
    config.add_defaults(DEFAULTS)
    stage = translate_stage(config)
    if config.values["adapter"] == "lora":
        config.add_defaults(
            {**LORA_DEFAULTS, "lora_alpha": 2 * config.values.get("r", LORA_DEFAULTS["r"])}
        )
    translate_data(config, stage, info)
    translate_shared_keys(config)


def flatten_v1(config: Translation) -> Info:
    """Rewrite the keys of v1 to those of the usual form; return the datasets."""
    for section in [key for key in config.values if key.endswith("_config")]:
        for key, value in config.take(section, {}).items():
            config.values[f"{section}.{key}"] = value
    config.rename(V1_RENAMED)
    if config.values.get("adapter") == "lora":
        config.add_defaults({"lora_alpha": 16, "lora_dropout": 0.05})
    config.values["fsdp"] = config.take("dist_config.name") == "fsdp2"
    config.values["use_liger_kernel"] = config.take("kernel_config.name") == "liger_kernel"
    config.values["save_strategy"] = "steps" if config.values.get("save_steps") else "no"
    config.add_defaults(V1_DEFAULTS)
    rows = config.take_number("global_batch_size")
    if rows:
        at_once = config.values["per_device_train_batch_size"] * config.gpus
        config.values["gradient_accumulation_steps"] = max(1, int(rows // at_once))
        config.names["gradient_accumulation_steps"] = "global_batch_size"
    for key in ("model_class", "quant_config.name"):
        config.take(key)
    return read_v1_datasets(config)


def read_v1_datasets(config: Translation) -> Info:
    named = str(config.take("train_dataset", ""))
    entries, data_folder = (
        read_datasets(config, named) if named.endswith((".yaml", ".yml")) else ({}, Path())
    )
    entries = entries or {"default": {"path": named}}
    config.values["dataset"] = [*entries] if named else []
    if any(entry.get("converter") == "pair" for entry in entries.values()):
        config.values["stage"] = "dpo"  # in v1 the command names it: `llamafactory-cli dpo`
    held_out = config.take("eval_dataset")
    if held_out:
        config.drop("eval_dataset", held_out, "see evaluation.perplexity")
    for name, entry in entries.items():
        if entry.get("weight"):
            config.drop(
                f"{name}.weight", entry["weight"], "of rows; see data.sources[].weight, of tokens"
            )
        entry["file_name" if entry.get("source") == "local" else "hf_hub_url"] = entry.get("path")
        entry |= {
            "num_samples": entry.get("size"),
            "formatting": entry.get("converter", "messages"),
        }
    return entries, data_folder


def translate_stage(config: Translation) -> str:
    """Translate `stage` and `pref_loss`; return the stage of the datasets' examples."""
    stage_name = str(config.take("stage")).lower()
    if stage_name not in STAGES:
        raise config.error("stage", f"expected {', '.join(STAGES)}, got {stage_name}")
    config.take("do_train")
    loss = str(config.take("pref_loss", "sigmoid")).lower() if stage_name == "dpo" else ""
    stage = {"orpo": "orpo", "simpo": "cpo"}.get(loss, STAGES[stage_name])
    config.put("stage", stage, f"stage: {stage_name}")
    if stage in ("cpo", "dpo"):
        config.put("training.loss_type", loss if stage == "cpo" else [loss], "pref_loss")
    if stage == "ppo":
        config.put_rewards({})
    return stage


def translate_data(config: Translation, stage: str, v1: Info | None) -> None:
    folder = str(config.take("dataset_dir", "data"))
    info, data_folder = v1 or read_datasets(config, f"{folder}/{INFO}")
    data_folder = data_folder if v1 else data_folder / folder
    limit = config.take_number("max_samples")

    def sources(key: str) -> list[dict[str, Any]]:
        sources = []
        for name in words_in(config.take(key, [])):
            entry = {"hf_hub_url": name} if folder == "ONLINE" else info.get(name)
            if not isinstance(entry, dict):
                missing = f"`{name}` is not in {data_folder / INFO}.{did_you_mean(name, info)}"
                raise config.error(key, f"{missing} Set dataset_dir to the folder of your {INFO}")
            source = source_of(config, name, entry, data_folder, stage)
            sources.append(source | ({"max_documents": limit} if limit else {}))
        return sources

    trained = sources("dataset")
    held_out = sources("eval_dataset")
    streams = config.take_switch("streaming")
    config.put_data("dataset", trained, held_out, "interleave_probs", "val_size", streams)
    packs = is_on(config.take("packing", stage == "cpt")) | config.take_switch("neat_packing")
    packing = "none"
    if packs:
        packing = "concatenate" if stage == "cpt" else "best_fit"
    config.put("data.packing", packing, "packing")


def read_datasets(config: Translation, name: str) -> Info:
    """Read a file in the current folder, or in one from the config's folder upwards; nothing if it is in none."""
    bases = (Path(), *list(config.path.absolute().parents)[:4])
    base = next((base for base in bases if (base / name).is_file()), None)
    if base is None:
        return {}, Path()
    mistakes = Mistakes()
    content = plain(read_or_raise(base / name, mistakes))
    mistakes.raise_if_any()
    return content, Path(shown_path(base))


def source_of(
    config: Translation, name: str, entry: dict[str, Any], folder: Path, stage: str
) -> dict[str, Any]:
    hub = entry.get("hf_hub_url")
    file = entry.get("file_name")
    if not hub and not file:
        raise config.error(
            "dataset", f"`{name}` has neither `file_name` nor `hf_hub_url` in {folder / INFO}"
        )
    source: dict[str, Any] = {"path": str(hub or folder / str(file)), "name": name}
    if hub:
        source |= {key: entry[key] for key in ("subset", "revision", "split") if entry.get(key)}
        source |= {"data_files": [f"{entry['folder']}/**"]} if entry.get("folder") else {}
    source |= {"max_documents": entry["num_samples"]} if entry.get("num_samples") else {}
    columns = {}
    for key, value in (entry.get("columns") or {}).items():
        if value:
            columns[str(key)] = str(value)
    if columns.keys() & {"images", "videos", "audios"}:
        raise config.error("dataset", f"`{name}`: {MULTIMODAL}")
    if stage == "cpt":
        column = columns.get("prompt", "instruction" if columns else "text")
        by_line = {"text_documents": "line"} if str(file).endswith(".txt") else {}
        return source | by_line | ({"text_column": column} if column != "text" else {})
    return source | {"chat": chat_of(entry, columns, stage)}


def chat_of(entry: dict[str, Any], columns: dict[str, str], stage: str) -> dict[str, str]:
    """Return the columns of an example: those of Alpaca, or messages."""
    answers = stage not in (*PREFERENCES, "ppo")
    form = entry.get("formatting", "alpaca")
    if form == "alpaca":
        columns = columns or {"query": "input"}
        question = columns.get("prompt", "instruction")
        query = columns.get("query")
        chat = {"user": f"{{{question}}}\n{{{query}}}" if query else question}
        chat |= {"assistant": columns.get("response", "output")} if answers else {}
    elif form == "pair":  # of v1: both sides are whole chats
        chat = {}
    else:
        default = "messages" if form == "messages" else "conversations"
        chat = {"messages" if answers else "prompt": columns.get("messages", default)}
    chat |= (
        {side: columns.get(side, side) for side in ("chosen", "rejected")}
        if stage in PREFERENCES
        else {}
    )
    chat |= {"label": columns.get("kto_tag", "kto_tag")} if stage == "kto" else {}
    return chat | {key: columns[key] for key in ("system", "history", "tools") if key in columns}
