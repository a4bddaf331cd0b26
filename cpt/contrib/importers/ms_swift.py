"""Translate an ms-swift run to a recipe: its command in a shell script, or its YAML config."""

import math
import re
import shlex
from functools import partial
from pathlib import Path
from typing import Any

from cpt.contrib.importers.translation import (
    MULTIMODAL,
    Sources,
    Translation,
    is_on,
    translate_shared_keys,
    words_in,
)
from cpt.errors import RecipeError
from cpt.recipe.tree import resolve_scalar

KEYS = ("model",)  # each identifies a config
RENAMED = {  # to names in Hugging Face's classes
    "model": "model_name_or_path",
    "train_type": "adapter",  # before 4.0
    "tuner_type": "adapter",
    "lora_rank": "r",
    "quant_bits": "quantization_bit",
    "attn_impl": "attn_implementation",
    "max_length": "sequence_length",
    "teacher_model": "teacher_model_name_or_path",
    "response_length": "max_completion_length",
}
DEFAULTS = {
    "adapter": "lora",
    "per_device_train_batch_size": 1,
    "num_train_epochs": 3,
    "weight_decay": 0.1,
    "adam_beta2": 0.95,
    "lr_scheduler_type": "cosine",
    "save_steps": 500,
    "gradient_checkpointing": True,
    "logging_steps": 5,
}
LORA_DEFAULTS = {"r": 8, "lora_alpha": 32, "lora_dropout": 0.05, "target_modules": "all-linear"}
REWARDS = {"accuracy": "maths_answer"}
STAGES = {"pt": "cpt", "sft": "sft", "rm": "reward"}
STAGES |= {name: name for name in ("dpo", "kto", "orpo", "cpo", "ppo", "grpo", "gkd")}
VISION = ("max_pixels", "vit_lr", "freeze_vit")
VISION_VARIABLES = re.compile(r"PIXELS|FRAMES|MAX_TOKEN_NUM")
REFUSED = {
    "swift_version": "args.json has all arguments, also those at their defaults; import the script or the YAML config",
    **dict.fromkeys(VISION, MULTIMODAL),
    "cached_dataset": "write the datasets from which it was made",
    "micro_batch_size": "a config for `megatron`, whose keys are not those of `swift`",
}
COMMAND = re.compile(
    r"(?:^|[\s/])(?:swift(?:\s+|/cli/|\.cli\.)(pt|sft|rlhf)(?:\.py)?|llamafactory-cli\s+train)(?:\s|$)"
)
AFTER_COMMAND = re.compile(r"\s(?:#|\||;|&|\d?>).*")
ASSIGNMENT = re.compile(r"(?:^|\s)(\w+)=(\"[^\"]*\"|'[^']*'|\S*)")
VARIABLE = re.compile(r"\$\{?(\w+)(?::?-([^}]*))?\}?")
ARITHMETIC = re.compile(r"\$\((?:expr |\()\s*(\d+)\s*([*/])\s*(\d+)\s*\)?\)")


def translate(config: Translation) -> None:
    environment = {key: str(value) for key, value in config.take("ENV", {}).items()}
    if any(map(VISION_VARIABLES.search, environment)):
        config.values["max_pixels"] = True
    config.refuse(REFUSED)
    processes = [environment.get(name, "1") for name in ("NPROC_PER_NODE", "NNODES")]
    config.gpus = max(
        config.gpus, math.prod(int(number) for number in processes if number.isdigit())
    )
    kind = config.take("task_type", "causal_lm")
    if kind != "causal_lm":
        raise config.error("task_type", f"cpt trains causal language models, not {kind}")
    translate_stage(config)
    config.rename(RENAMED)
    config.add_defaults(DEFAULTS)
    values = config.values
    config.add_defaults({"learning_rate": 1e-5 if values["adapter"] == "full" else 1e-4})
    rows = int(values["per_device_train_batch_size"])
    config.add_defaults({"gradient_accumulation_steps": max(1, math.ceil(16 / rows / config.gpus))})
    if values["adapter"] == "lora":
        config.add_defaults(LORA_DEFAULTS)
    if not values.get("sequence_length"):
        values["sequence_length"] = 2048
        config.names["sequence_length"] = "FILL IN: ms-swift takes the model's longest"
    is_half = config.take("torch_dtype", "bfloat16") == "bfloat16"
    config.add_defaults(
        {"bf16": is_half and not values.get("fp16"), "fp16": not is_half and not values.get("bf16")}
    )
    if not config.take_switch("use_hf") and environment.get("USE_HF") != "1":
        config.drop(
            "use_hf",
            False,
            "models and datasets are named as on ModelScope; the Hub may have other names",
        )
    translate_data(config)
    translate_shared_keys(config)


def translate_stage(config: Translation) -> None:
    """Translate the command, or in a YAML config the keys that only one command has."""
    command = config.take("command")
    kind = str(config.take("rlhf_type", "")).lower()
    is_text = (
        not is_on(config.values.get("use_chat_template", True))
        or config.values.get("loss_scale") == "all"
    )
    stage_name = kind or {"rlhf": "dpo"}.get(command, command) or ("pt" if is_text else "sft")
    if stage_name not in STAGES:
        raise config.error(
            "rlhf_type", f"cpt has no stage for {stage_name}; it has {', '.join(STAGES)}"
        )
    stage = STAGES[stage_name]
    is_sure = command or kind or is_text
    config.put(
        "stage",
        stage,
        f"swift {command or stage_name}"
        if is_sure
        else "FILL IN: cpt if the command is `swift pt`",
    )
    if stage == "cpt":
        config.values.update(use_chat_template=None, loss_scale=None)
    elif stage == "dpo" and (loss := config.take("loss_type")):
        config.put("training.loss_type", words_in(loss), "loss_type")
    elif stage in ("grpo", "ppo"):
        config.put_rewards(REWARDS)
    elif stage == "gkd" and not config.values.get("teacher_model"):
        raise config.error("teacher_model", "missing: cpt distills from another model")
    config.add_defaults({"beta": 0.04} if stage == "grpo" else {})


def translate_data(config: Translation) -> None:
    def sources(key: str) -> Sources:
        return list(map(source_of, words_in(config.take(key, []))))

    trained = sources("dataset")
    held_out = sources("val_dataset")
    streams = config.take_switch("streaming")
    config.put_data("dataset", trained, held_out, "interleave_prob", "split_dataset_ratio", streams)
    config.put("data.packing", "best_fit" if config.take_switch("packing") else "none", "packing")


def source_of(name: str) -> dict[str, Any]:
    """Return the source `[hf::]path[:subset][#number]`."""
    path, _, number = name.rpartition("::")[2].partition("#")
    path, _, subset = path.partition(":")
    source = {"path": path} | ({"max_documents": int(number)} if number else {})
    return source | ({"subset": subset} if subset not in ("", "all", "default") else {})


def read_script(path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the arguments of the training command in a shell script, and their lines."""
    try:
        text = path.read_text(encoding="utf-8")
        commands_found = commands(text)
    except (OSError, ValueError) as problem:  # ValueError: not UTF-8, or a quote that is not closed
        raise RecipeError(f"{path}: cannot be read: {problem}") from problem
    if len(commands_found) != 1:
        names = "`swift pt`, `swift sft`, `swift rlhf` or `llamafactory-cli train`"
        raise RecipeError(f"{path}: expected one command {names}, found {len(commands_found)}.")
    if "config" in commands_found[0]:
        raise RecipeError(
            f"{path}: the arguments are in another file: cpt import {commands_found[0]['config']}"
        )
    lines: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        for key in re.findall(r"--([\w-]+)", line):
            lines.setdefault(key.replace("-", "_"), number)
    unknown = next(
        (key for key, value in commands_found[0].items() if key != "ENV" and "$" in str(value)),
        None,
    )
    if unknown:
        raise RecipeError(
            f"{path}:{lines.get(unknown, 1)}: {unknown}: write the value of {commands_found[0][unknown]} here."
        )
    return commands_found[0], lines


def commands(text: str) -> list[dict[str, Any]]:
    """Return the arguments of each training command, those of ms-swift with the command's name and environment."""
    parsed: list[dict[str, Any]] = []
    shell: dict[str, str] = {}
    for line in re.sub(r"(?m)^\s*#.*\n?", "", text).replace("\\\n", " ").splitlines():
        line = VARIABLE.sub(partial(expanded, shell), line)
        line = ARITHMETIC.sub(calculated, line)
        command = COMMAND.search(line)
        before = line[: command.start()] if command else line
        assigned = {name: value.strip("\"'") for name, value in ASSIGNMENT.findall(before)}
        if command:
            launcher = re.findall(r"--(nproc_per_node|nnodes)[= ](\d+)", before)
            about = {
                "command": command[1],
                "ENV": shell | assigned | {key.upper(): value for key, value in launcher},
            }
            arguments_text = shlex.split(AFTER_COMMAND.sub("", line[command.end() :]))
            parsed.append(arguments(arguments_text) | (about if command[1] else {}))
        elif re.match(r"\s*(export\s+)?\w+=", line):
            shell |= assigned
    return parsed


def expanded(shell: dict[str, str], match: re.Match[str]) -> str:
    return shell.get(match[1], match[2] or match[0])


def calculated(match: re.Match[str]) -> str:
    left = int(match[1])
    other = int(match[3])
    return str(left * other if match[2] == "*" else left // max(other, 1))


def arguments(words: list[str]) -> dict[str, Any]:
    """`{"learning_rate": 1e-5, "dataset": ["a", "b"]}` of `--learning_rate 1e-5 --dataset a b`."""
    values_by_name: dict[str, list[Any]] = {}
    key = "config"
    for word in words:
        if word.startswith("--"):
            key, _, value = word[2:].partition("=")
            key = key.replace("-", "_")
            values_by_name[key] = [resolve_scalar(value)] if value else []
        elif word not in ("...", "$@"):
            values_by_name.setdefault(key, []).append(resolve_scalar(word))
    return {
        key: values[0] if len(values) == 1 else values or True
        for key, values in values_by_name.items()
    }
