"""Translate a LLaMA-Factory config to a recipe."""

import json
from pathlib import Path
from typing import Any

from cpt.errors import RecipeError
from cpt.importers.translation import Translation, is_on, target_modules, translate_trainer_keys
from cpt.plugins import did_you_mean
from cpt.recipe.tree import shown_path

NEEDS = "model_name_or_path"
RENAMED = {  # to names in Hugging Face's classes
    "cutoff_len": "sequence_length",
    "pref_beta": "beta",
    "dpo_label_smoothing": "label_smoothing",
    "kto_chosen_weight": "desirable_weight",
    "kto_rejected_weight": "undesirable_weight",
}
DEFAULTS = {
    "stage": "sft",
    "finetuning_type": "lora",
    "sequence_length": 2048,
    "per_device_train_batch_size": 8,
    "num_train_epochs": 3,
    "learning_rate": 5e-5,
    "lr_scheduler_type": "linear",
    "save_steps": 500,
    "gradient_checkpointing": True,
}
MOVED = {NEEDS: "model.path", "model_revision": "model.revision", "resize_vocab": "model.resize_embeddings"}
LORA = {  # key -> option of peft
    "lora_rank": "r",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "lora_target": "target_modules",
    "additional_target": "modules_to_save",
    "use_rslora": "use_rslora",
    "use_dora": "use_dora",
}
STAGES = {"pt": "cpt", "sft": "sft", "rm": "reward", "ppo": "ppo", "dpo": "dpo", "kto": "kto"}
PREFERENCES = ("dpo", "reward", "orpo", "cpo")
INFO = "dataset_info.json"


def translate(config: Translation) -> None:
    config.rename(RENAMED)
    config.add_defaults(DEFAULTS)
    stage = translate_stage(config)
    config.move(MOVED)
    config.put_attention("flash_attn", config.take("flash_attn"))
    tuning = str(config.take("finetuning_type")).lower()
    if tuning == "lora":
        config.move({key: f"model.lora.{option}" for key, option in LORA.items()})
        lora = config.recipe["model"].setdefault("lora", {})
        lora["r"] = lora.get("r", 8)
        lora.setdefault("lora_alpha", 2 * lora["r"])
        lora["target_modules"] = target_modules(lora.get("target_modules", "all"))
        if "modules_to_save" in lora:
            lora["modules_to_save"] = target_modules(lora["modules_to_save"])
        if config.values.get("quantization_bit") == 4:
            config.take("quantization_bit")
            lora |= {"quantize": "nf4", "double_quantize": True}
    elif tuning != "full":
        config.drop("finetuning_type", tuning, "all parameters are trained; see model.lora")
    translate_data(config, stage)
    translate_trainer_keys(config)


def translate_stage(config: Translation) -> str:
    """Translate `stage` and `pref_loss`; return the stage of the datasets' examples."""
    asked = str(config.take("stage")).lower()
    if asked not in STAGES:
        raise config.error("stage", f"expected {', '.join(STAGES)}, got {asked}")
    config.take("do_train")
    loss = str(config.take("pref_loss", "sigmoid")).lower() if asked == "dpo" else ""
    stage = {"orpo": "orpo", "simpo": "cpo"}.get(loss, STAGES[asked])
    config.put("stage", stage, f"stage: {asked}")
    if config.take_switch("train_from_scratch"):
        config.put("stage", "pretrain" if stage == "cpt" else stage)
        config.put("model.from_scratch", True)
    elif stage == "sft" and config.take_switch("train_on_prompt"):
        config.put("stage", "cpt", "train_on_prompt: all tokens are trained on")
    if stage in ("cpo", "dpo"):
        config.put("training.loss_type", loss if stage == "cpo" else [loss], "pref_loss")
    if stage == "ppo":
        path = config.take("reward_model")
        rewards = [{"name": "reward_model", "path": str(path)}] if path else ["exact_match"]
        config.put("rewards", rewards, "reward_model" if path else "FILL IN: see docs/reference/training.md")
    return stage


def translate_data(config: Translation, stage: str) -> None:
    folder = str(config.take("dataset_dir", "data"))
    info, place = ({}, Path(folder)) if folder == "ONLINE" else read_info(config, folder)
    limit = config.take_number("max_samples")

    def sources(key: str) -> list[dict[str, Any]]:
        found = []
        for name in names_in(config.take(key, [])):
            entry = {"hf_hub_url": name} if folder == "ONLINE" else info.get(name)
            if not isinstance(entry, dict):
                missing = f"`{name}` is not in {place / INFO}.{did_you_mean(name, info)}"
                raise config.error(key, f"{missing} Set dataset_dir to the folder of your {INFO}")
            source = source_of(config, name, entry, place, stage)
            found.append(source | ({"max_documents": limit} if limit else {}))
        return found

    trained, held_out = sources("dataset"), sources("eval_dataset")
    if not trained:
        raise RecipeError(f"{config.path}: `dataset` is missing. Set the data to train on")
    config.take("mix_strategy")
    weights = names_in(config.take("interleave_probs", []))
    if weights and len(weights) != len(trained):
        raise config.error("interleave_probs", f"expected {len(trained)} numbers, got {len(weights)}")
    for source, weight in zip(trained, weights, strict=False):
        source["weight"] = float(weight)
    config.put_sources("data.sources", trained, streams=config.take_switch("streaming"))
    if held_out:
        config.put_sources("evaluation.perplexity", held_out)
    config.put_held_out_share("val_size")
    neat, packs = config.take_switch("neat_packing"), is_on(config.take("packing", stage == "cpt"))
    concatenates = packs and stage == "cpt" and not neat
    config.put("data.packing", "concatenate" if concatenates else "best_fit" if packs or neat else "none", "packing")


def names_in(value: Any) -> list[str]:
    """Split names at commas; accept a list, too."""
    words = value if isinstance(value, list) else str(value).split(",")
    return [str(word).strip() for word in words if str(word).strip()]


def read_info(config: Translation, folder: str) -> tuple[dict[str, Any], Path]:
    """Find dataset_info.json and its folder, from the current folder and the config's folder upwards."""
    for base in (Path(), *list(config.path.absolute().parents)[:4]):
        file = base / folder / INFO
        if file.is_file():
            try:
                return dict(json.loads(file.read_text(encoding="utf-8"))), Path(shown_path(base / folder))
            except (OSError, ValueError, TypeError) as problem:
                raise RecipeError(f"{file}: expected JSON with a dataset under each name: {problem}") from problem
    return {}, Path(folder)


def source_of(config: Translation, name: str, entry: dict[str, Any], place: Path, stage: str) -> dict[str, Any]:
    hub, file = entry.get("hf_hub_url"), entry.get("file_name")
    if not hub and not file:
        raise config.error("dataset", f"`{name}` has neither `file_name` nor `hf_hub_url` in {place / INFO}")
    source: dict[str, Any] = {"path": str(hub or place / str(file)), "name": name}
    if hub:
        source |= {key: entry[key] for key in ("subset", "revision", "split") if entry.get(key)}
        source |= {"data_files": [f"{entry['folder']}/**"]} if entry.get("folder") else {}
    source |= {"max_documents": entry["num_samples"]} if entry.get("num_samples") else {}
    columns = {str(key): str(value) for key, value in (entry.get("columns") or {}).items() if value}
    if stage == "cpt":
        column = columns.get("prompt", "instruction" if columns else "text")
        by_line = {"text_documents": "line"} if str(file).endswith(".txt") else {}
        return source | by_line | ({"text_column": column} if column != "text" else {})
    if entry.get("tags"):
        config.drop(f"{INFO}: {name}.tags", entry["tags"], "messages are {role, content} or {from, value}")
    return source | {"chat": chat_of(entry, columns, stage)}


def chat_of(entry: dict[str, Any], columns: dict[str, str], stage: str) -> dict[str, str]:
    """Return the columns of an example: those of Alpaca, or messages."""
    answers = stage not in (*PREFERENCES, "ppo")
    if entry.get("formatting", "alpaca") == "alpaca":
        columns = columns or {"query": "input"}
        question, query = columns.get("prompt", "instruction"), columns.get("query")
        chat = {"user": f"{{{question}}}\n{{{query}}}" if query else question}
        chat |= {"assistant": columns.get("response", "output")} if answers else {}
    else:
        chat = {"messages" if answers else "prompt": columns.get("messages", "conversations")}
    chat |= {side: columns.get(side, side) for side in ("chosen", "rejected")} if stage in PREFERENCES else {}
    chat |= {"label": columns.get("kto_tag", "kto_tag")} if stage == "kto" else {}
    return chat | {key: columns[key] for key in ("system", "history", "tools") if key in columns}
