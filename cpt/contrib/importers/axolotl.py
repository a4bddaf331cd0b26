"""Translate an axolotl config to a recipe."""

import re
from pathlib import Path
from typing import Any

from cpt.contrib.importers.translation import (
    Translation,
    is_on,
    is_on_the_hub,
    translate_shared_keys,
)

KEYS = ("base_model",)  # each identifies a config
RENAMED = {  # to names in Hugging Face's classes
    "base_model": "model_name_or_path",
    "revision_of_model": "model_revision",
    "tokenizer_config": "tokenizer_name",
    "resize_token_embeddings_to_32x": "resize_vocab",
    "lora_r": "r",
    "lora_target_modules": "target_modules",
    "lora_modules_to_save": "modules_to_save",
    "peft_use_dora": "use_dora",
    "peft_use_rslora": "use_rslora",
    "sequence_len": "sequence_length",
    "micro_batch_size": "per_device_train_batch_size",
    "num_epochs": "num_train_epochs",
    "optimizer": "optim",
    "lr_scheduler": "lr_scheduler_type",
    "rl_beta": "beta",
    "kto_desirable_weight": "desirable_weight",
    "kto_undesirable_weight": "undesirable_weight",
}
DEFAULTS = {
    "sequence_length": 512,
    "per_device_train_batch_size": 1,
    "num_train_epochs": 1,
    "lr_scheduler_type": "cosine",
    "saves_per_epoch": 1,
    "save_total_limit": 4,
}
STAGES = {"dpo": "dpo", "kto": "kto", "orpo": "orpo", "grpo": "grpo", "gdpo": "grpo"}
REFUSED = {
    "process_reward_model": "cpt does not train rewards of single steps; it has stage `reward` for whole answers",
    **dict.fromkeys(
        ("diffusion", "diffusion_lm", "diffusion_decision"), "cpt does not train diffusion models"
    ),
}
TEXT = ("", "completion", "pretrain")
CHATS = {
    "chat_template": "messages",
    "messages": "messages",
    "sharegpt": "conversations",
}  # type -> its column
QUESTIONS = {
    "ultra": "prompt",
    "intel": "question",
    "chat_template": "input",
}  # ending of a type -> column
INSTRUCTION = "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"


def translate(config: Translation) -> None:
    config.refuse(REFUSED)
    config.rename(RENAMED)
    config.values |= config.take("trl", {})
    if config.values.get("warmup_steps") is None:
        config.add_defaults({"warmup_ratio": 0.03})
    config.add_defaults(DEFAULTS)
    if config.values.get("flash_attention"):  # of older configs
        config.rename({"flash_attention": "attn_implementation"})
    if config.take_switch("lora_target_linear"):
        config.values["target_modules"] = "all-linear"
    stage = translate_stage(config)
    translate_data(config, stage)
    translate_shared_keys(config)


def translate_stage(config: Translation) -> str:
    rl = str(config.take("rl", "")).lower()
    learns_inputs = is_on(config.values.get("train_on_inputs"))
    families = {family(dataset.get("type")) for dataset in datasets(config, "datasets")}
    stage = "cpt" if families <= {*TEXT} or learns_inputs and families <= {*CHATS} else "sft"
    stage = "reward" if config.take_switch("reward_model") else stage
    if rl:
        if rl not in STAGES:
            raise config.error("rl", f"cpt has no stage for {rl}; it has {', '.join(STAGES)}")
        stage = STAGES[rl]
    if stage == "cpt" or not learns_inputs:
        config.take("train_on_inputs")
    config.put("stage", stage)
    if config.take_switch("reinit_weights"):
        config.put("stage", "pretrain" if stage == "cpt" else stage)
        config.put("model.from_scratch", True)
    if rl == "gdpo":
        config.values.setdefault("multi_objective_aggregation", "normalize_then_sum")
    if stage == "grpo":
        config.put_rewards({})
    return stage


def family(kind: Any) -> str:
    """Return `chat_template` for `chat_template.default`; None for a custom type."""
    if isinstance(kind, dict):
        return "own"
    return re.split(r"[.:]", str(kind or ""))[0]


def datasets(config: Translation, key: str) -> list[dict[str, Any]]:
    """Return the entries of a list of datasets, without removing them from the config."""
    entries: Any = config.values.get(key) or []
    if isinstance(entries, str):
        entries = {"path": entries}
    entries = [entries] if isinstance(entries, dict) else entries
    if not isinstance(entries, list) or not all(
        isinstance(entry, dict) and (entry.get("path") or entry.get("data_files"))
        for entry in entries
    ):
        raise config.error(key, "expected a list of datasets, each with a `path` or `data_files`")
    config.values[key] = entries
    return entries


def translate_data(config: Translation, stage: str) -> None:
    texts = []
    for entry in datasets(config, "pretraining_dataset"):
        texts += sources_of(entry, "cpt")
    trained = list(texts)
    for entry in datasets(config, "datasets"):
        trained += sources_of(entry, stage)
    held_out = []
    for entry in datasets(config, "test_datasets"):
        held_out += sources_of(entry, stage)
    streams = config.take_switch("streaming") or bool(texts)
    config.put_data("datasets", trained, held_out, "", "val_set_size", streams)
    packs = config.take_switch("sample_packing") and stage in ("cpt", "sft")
    packing = "concatenate" if texts else "none"
    if packs:
        packing = "best_fit"
    config.put("data.packing", packing, "sample_packing")


def sources_of(dataset: dict[str, Any], stage: str) -> list[dict[str, Any]]:
    """Return a dataset's sources; keys that remain in it are not translated."""
    path = str(dataset.pop("path", None) or "")
    kind = dataset.pop("type", None)
    for key in ("ds_type", "ds_tool"):  # the format of the files, which cpt reads from their names
        dataset.pop(key, None)
    files = dataset.pop("data_files", None) or []
    if not isinstance(files, list):
        files = [files]
    files = list(map(str, files))
    form: dict[str, Any] = {}
    if is_on_the_hub(path):
        names = {"name": "subset", "revision": "revision", "split": "split"}
        form = {ours: dataset.pop(key) for key, ours in names.items() if dataset.get(key)}
        form |= {"data_files": files} if files else {}
        files = []
    if family(kind) in TEXT:
        column = dataset.pop("field", None) or dataset.pop("text_column", None) or "text"
        form |= {"text_column": str(column)} if column != "text" else {}
    elif chat := chat_of(dataset, kind, stage):
        form["chat"] = chat
    else:
        dataset["type"] = kind
    # `path: json` names a kind of files
    if path and Path(path).is_dir():
        inside = Path(path)
    else:
        inside = Path()
    return [{"path": str(inside / name), **form} for name in files] or [{"path": path, **form}]


def chat_of(dataset: dict[str, Any], kind: Any, stage: str) -> dict[str, str] | str | None:
    """Return the columns of an example; None for an unknown type."""
    if isinstance(kind, dict) or stage == "grpo":
        return None
    if family(kind) in CHATS:
        for key in ("message_property_mappings", "message_field_role", "message_field_content"):
            dataset.pop(key, None)  # both {role, content} and {from, value} are supported
        messages = str(dataset.pop("field_messages", None) or CHATS[family(kind)])
        if stage in ("sft", "cpt"):
            return messages
        sides = {}
        for side in ("chosen", "rejected"):
            sides[side] = str(dataset.pop(f"field_{side}", None) or side)
        if str(kind).endswith("argilla"):
            return sides
        return {"prompt": messages, **sides}
    if stage in ("sft", "cpt"):
        if kind == "alpaca":
            return {"prompt": INSTRUCTION, "completion": "output"}
        return None
    question = QUESTIONS.get(str(kind).partition(".")[2])
    if stage == "kto":
        answers = {"assistant": "completion", "label": "label"}
    else:
        answers = {"chosen": "chosen", "rejected": "rejected"}
    if question:
        return {"user": question, "system": "system", **answers}
    return None
