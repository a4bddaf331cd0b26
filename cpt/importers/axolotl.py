"""Translate an axolotl config to a recipe."""

import re
from pathlib import Path
from typing import Any

from cpt.errors import RecipeError
from cpt.importers.translation import Translation, is_on_the_hub, target_modules, translate_trainer_keys

NEEDS = "base_model"
RENAMED = {  # to names in Hugging Face's classes
    "sequence_len": "sequence_length",
    "micro_batch_size": "per_device_train_batch_size",
    "num_epochs": "num_train_epochs",
    "optimizer": "optim",
    "lr_scheduler": "lr_scheduler_type",
    "rl_beta": "beta",
    "dpo_label_smoothing": "label_smoothing",
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
MOVED = {
    NEEDS: "model.path",
    "revision_of_model": "model.revision",
    "tokenizer_config": "tokenizer.path",
    "resize_token_embeddings_to_32x": "model.resize_embeddings",
}
LORA = {  # key -> option of peft
    "lora_r": "r",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "lora_target_modules": "target_modules",
    "lora_modules_to_save": "modules_to_save",
    "peft_use_dora": "use_dora",
    "peft_use_rslora": "use_rslora",
}
STAGES = {"dpo": "dpo", "ipo": "dpo", "kto": "kto", "orpo": "orpo", "simpo": "cpo", "grpo": "grpo"}
ATTENTION = {
    "flash_attention": "flash_attention_2",
    "sdp_attention": "sdpa",
    "eager_attention": "eager",
    "flex_attention": "flex_attention",
}
TEXT = ("", "completion", "pretrain")
CHATS = {"chat_template": "messages", "messages": "messages", "sharegpt": "conversations"}  # type -> its column
INSTRUCTION = "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"


def translate(config: Translation) -> None:
    config.rename(RENAMED)
    config.values |= config.take_section("trl")
    if config.values.get("warmup_steps") is None:
        config.add_defaults({"warmup_ratio": 0.03})
    config.add_defaults(DEFAULTS)
    stage = translate_stage(config)
    config.move(MOVED)
    for key, name in ATTENTION.items():
        config.put_attention(key, name if config.take_switch(key) else "")
    config.put_attention("attn_implementation", config.take("attn_implementation"))
    adapter = str(config.take("adapter", "")).lower()
    if adapter in ("lora", "qlora"):
        config.put("model.lora", {})
        config.move({key: f"model.lora.{option}" for key, option in LORA.items()})
        lora = config.recipe["model"]["lora"]
        if config.take_switch("lora_target_linear"):
            lora["target_modules"] = "all-linear"
        elif "target_modules" in lora:
            lora["target_modules"] = target_modules(lora["target_modules"])
        if config.take_switch("load_in_4bit") or adapter == "qlora":
            lora |= {"quantize": "nf4", "double_quantize": True}
    elif adapter:
        config.drop("adapter", adapter, "all parameters are trained; see model.lora")
    translate_data(config, stage)
    translate_trainer_keys(config)


def translate_stage(config: Translation) -> str:
    rl, learns_inputs = str(config.take("rl", "")).lower(), config.take_switch("train_on_inputs")
    families = {family(dataset.get("type")) for dataset in datasets(config, "datasets")}
    stage = "cpt" if families <= {*TEXT} or learns_inputs and families <= {*CHATS} else "sft"
    stage = STAGES.get(rl) or ("reward" if config.take_switch("reward_model") else stage)
    if rl and rl not in STAGES:
        config.drop("rl", rl, "unsupported stage; see docs/reference/training.md")
    if learns_inputs and stage != "cpt":
        config.drop("train_on_inputs", True, f"stage {stage} only trains on answers")
    config.put("stage", stage)
    if config.take_switch("random_init_weights") or config.take_switch("reinit_weights"):
        config.put("stage", "pretrain" if stage == "cpt" else stage)
        config.put("model.from_scratch", True)
    if rl in ("ipo", "simpo"):
        config.put("training.loss_type", [rl] if rl == "ipo" else rl, f"rl: {rl}")
    if stage == "grpo":
        names = [":".join(str(name).rsplit(".", 1)) for name in config.take("reward_funcs", [])]
        weights = config.take("reward_weights", [1.0] * len(names))
        rewards = [{"name": name, "weight": weight} for name, weight in zip(names, weights, strict=False)]
        config.put("rewards", rewards or [{"name": "exact_match"}], "FILL IN" if not rewards else "reward_funcs")
    return stage


def family(kind: Any) -> str:
    """Return `chat_template` for `chat_template.default`; None for a custom type."""
    return "own" if isinstance(kind, dict) else re.split(r"[.:]", str(kind or ""))[0]


def datasets(config: Translation, key: str) -> list[dict[str, Any]]:
    """Return the entries of a list of datasets, without removing them from the config."""
    found: Any = config.values.get(key) or []
    if isinstance(found, str):
        found = {"path": found}
    found = [found] if isinstance(found, dict) else found
    if not isinstance(found, list) or not all(isinstance(entry, dict) and entry.get("path") for entry in found):
        raise config.error(key, "expected a list of datasets, each with a `path`")
    config.values[key] = found
    return found


def translate_data(config: Translation, stage: str) -> None:
    texts = [source for entry in datasets(config, "pretraining_dataset") for source in sources_of(entry, "cpt")]
    others = [source for entry in datasets(config, "datasets") for source in sources_of(entry, stage)]
    if not texts and not others:
        raise RecipeError(f"{config.path}: `datasets` and `pretraining_dataset` are missing. Set the data to train on")
    config.put_sources("data.sources", texts + others, streams=config.take_switch("streaming") or bool(texts))
    packs = config.take_switch("sample_packing") and stage in ("cpt", "sft")
    config.put("data.packing", "best_fit" if packs else "concatenate" if texts else "none", "sample_packing")
    held_out = [source for entry in datasets(config, "test_datasets") for source in sources_of(entry, stage)]
    if held_out:
        config.put_sources("evaluation.perplexity", held_out)
    config.put_held_out_share("val_set_size")


def sources_of(dataset: dict[str, Any], stage: str) -> list[dict[str, Any]]:
    """Return a dataset's sources; keys that remain in it are not translated."""
    path, kind = str(dataset.pop("path")), dataset.pop("type", None)
    dataset.pop("ds_type", None)
    files = dataset.pop("data_files", None) or []
    files = [str(name) for name in (files if isinstance(files, list) else [files])]
    form: dict[str, Any] = {}
    if is_on_the_hub(path):
        names = {"name": "subset", "revision": "revision", "split": "split"}
        form = {ours: dataset.pop(key) for key, ours in names.items() if dataset.get(key)}
        form |= {"data_files": files} if files else {}
        files = []
    elif dataset.get("split") == "train":
        del dataset["split"]
    if family(kind) in TEXT:
        column = dataset.pop("field", None) or dataset.pop("text_column", None) or "text"
        form |= {"text_column": str(column)} if column != "text" else {}
    elif chat := chat_of(dataset, kind, stage):
        form["chat"] = chat
    else:
        dataset["type"] = kind
    inside = Path(path) if Path(path).is_dir() else Path()  # `path: json` names a kind of files
    return [{"path": str(inside / name), **form} for name in files] or [{"path": path, **form}]


def chat_of(dataset: dict[str, Any], kind: Any, stage: str) -> dict[str, str] | str | None:
    """Return the columns of an example; None for an unknown type."""
    if stage in ("sft", "cpt"):
        if family(kind) in CHATS:
            for key in ("message_property_mappings", "message_field_role", "message_field_content"):
                dataset.pop(key, None)  # both {role, content} and {from, value} are supported
            return str(dataset.pop("field_messages", None) or CHATS[family(kind)])
        return {"prompt": INSTRUCTION, "completion": "output"} if kind == "alpaca" else None
    question = {"intel": "question", "argilla": "instruction"}.get(str(kind).partition(".")[2], "prompt")
    if isinstance(kind, dict) or stage == "grpo":
        return None
    chat = {"user": question, "system": "system"}
    if stage == "kto":
        return chat | {"assistant": "completion", "label": "label"}
    end = "_response" if question == "instruction" else ""
    return chat | {"chosen": f"chosen{end}", "rejected": f"rejected{end}"}
