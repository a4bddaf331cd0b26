"""Translate another tool's config: untranslated keys, the recipe so far, and the Trainer's keys."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cpt.errors import RecipeError
from cpt.plugins import fits
from cpt.recipe.huggingface_keys import STAGE_CONFIGS, keys_of_config
from cpt.recipe.keys import MOVED, NO_EFFECT, NO_EFFECT_ON_EXAMPLES, keys_of
from cpt.recipe.paths import is_local
from cpt.recipe.rules import reported_name
from cpt.recipe.schema import Recipe, Source
from cpt.recipe.tree import dotted, leaves
from cpt.recipe.values import in_yaml, write_yaml
from cpt.training.engine_profiles import read_profile

WIDTH = 118
NOT_PASSED = MOVED.keys() | NO_EFFECT.keys() | NO_EFFECT_ON_EXAMPLES.keys() | {"push_to_hub", "hub_model_id"}
OWN_TEMPLATE = "the tokenizer's template is used; for another one, save a tokenizer with it and set tokenizer.path"
HINTS = {  # common key that is not translated -> replacement
    "trust_remote_code": "set model.revision to a commit that you have read, and model.trust_remote_code: true",
    "chat_template": OWN_TEMPLATE,
    "template": OWN_TEMPLATE,
    "special_tokens.pad_token": "not needed: padding is masked",
    "load_in_8bit": "use a 4-bit base (model.lora.quantize), or an unquantized one",
    "rope_scaling": "see model.rope",
    "sequence_parallel_degree": "see docs/explanation/planning.md",
    "context_parallel_size": "see docs/explanation/planning.md",
}
DEFAULTS = {  # defaults of the Trainer that differ in cpt
    "gradient_accumulation_steps": 1,
    "optim": "adamw_torch",
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
}
OPTIMIZERS = {
    **dict.fromkeys(("adamw", "adamw_hf", "adamw_torch", "adamw_torch_fused", "adamw_apex_fused"), "adamw"),
    **dict.fromkeys(("adamw_anyprecision", "paged_adamw", "paged_adamw_32bit"), "adamw"),
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "adamw_torch_8bit", "ao_adamw_8bit"), "adamw_8bit"),
    **{name: name for name in ("paged_adamw_8bit", "muon", "sgd")},
    "adafactor": "torch.optim:Adafactor",
}
TAKES_BETAS = ("adamw", "adamw_8bit", "paged_adamw_8bit", "muon")
SCHEDULES = {
    **dict.fromkeys(("cosine", "cosine_with_min_lr"), "cosine"),
    **dict.fromkeys(("constant", "constant_with_warmup"), "constant"),
    "linear": "linear",
}
ATTENTION = {"eager": "eager", "disabled": "eager", "sdpa": "sdpa", "flex_attention": "flex_attention"}
ZERO_1, ZERO_2_OFFLOAD, ZERO_3, ZERO_3_OFFLOAD = (
    f"deepspeed_configs/ds_config_{name}.json" for name in ("zero1", "prototype", "production", "8b_24gb")
)
# ZeRO stage -> profile without and with offload. ZeRO-2 without offload uses ZeRO-1's.
PROFILES = {"1": (ZERO_1, ZERO_1), "2": (ZERO_1, ZERO_2_OFFLOAD), "3": (ZERO_3, ZERO_3_OFFLOAD)}
STAGE_IN_NAME = re.compile(r"z(?:ero)?([123])")


@dataclass
class Translation:
    """`take` removes a key from the config, `put` writes it into the recipe; the remaining keys are not translated."""

    path: Path
    tool: str
    values: dict[str, Any]
    lines: Mapping[str, int]  # top-level key -> its line in the config
    gpus: int = 1  # GPUs of the original run, to convert steps
    recipe: dict[str, Any] = field(default_factory=lambda: {"training": {}})
    comments: dict[str, str] = field(default_factory=dict)  # location in the recipe -> the original key, or a reason
    dropped: dict[str, tuple[Any, str]] = field(default_factory=dict)  # key not translated -> its value and the reason
    names: dict[str, str] = field(default_factory=dict)  # key -> its spelling in the config, or `axolotl's default`

    def rename(self, names: Mapping[str, str]) -> None:
        for old, new in names.items():
            if self.values.get(old) is not None and self.values.get(new) is None:
                self.values[new] = self.values.pop(old)
                self.names[new] = old

    def add_defaults(self, defaults: Mapping[str, Any]) -> None:
        for key, value in defaults.items():
            if self.values.get(key) is None:
                self.values[key] = value
                self.names[key] = f"{self.tool}'s default"

    def take(self, key: str, default: Any = None) -> Any:
        """Remove a key and return its value; the default if it is missing or null."""
        found = self.values.pop(key, None)
        return default if found is None else found

    def take_switch(self, key: str) -> bool:
        return is_on(self.take(key))

    def take_number(self, key: str) -> float:
        """Take a number, also written as text: `"1e-5"`; 0 if it is missing."""
        found = self.take(key, 0)
        try:
            number = math.nan if isinstance(found, bool) else float(found)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            raise self.error(key, f"expected a number, got {in_yaml(found)}")
        return int(number) if number.is_integer() else number

    def take_section(self, key: str) -> dict[str, Any]:
        found = self.take(key) or {}
        if not isinstance(found, dict):
            raise self.error(key, f"expected keys with values, got {in_yaml(found)}")
        return found

    def error(self, key: str, problem: str) -> RecipeError:
        name = self.names.get(key, key)
        return RecipeError(f"{self.path}:{self.lines.get(name, 1)}: {name}: {problem}")

    def put(self, location: str, value: Any, comment: str = "") -> None:
        """Write `put("optimizer.learning_rate", 1e-5, "lr")`; the comment is the original key, or a reason."""
        *sections, key = location.split(".")
        here = self.recipe
        for section in sections:
            here = here.setdefault(section, {})
        here[key] = value
        comment = self.names.get(comment, comment)
        if comment != key:
            self.comments[location] = comment

    def move(self, table: Mapping[str, str]) -> None:
        """Write the values of keys with the same meaning under another name: key -> location in the recipe."""
        for key, location in table.items():
            value = self.take(key)
            if value not in (None, "", False):
                self.put(location, value, key)

    def drop(self, key: str, value: Any, reason: str) -> None:
        self.dropped[self.names.get(key, key)] = (value, reason)

    def put_sources(self, location: str, sources: list[dict[str, Any]], *, streams: bool = False) -> None:
        """Write sources with unique names. The tools concatenate datasets, so mix them by size."""
        names: list[str] = []
        for source in sources:
            if streams and is_on_the_hub(source["path"]):
                source["streaming"] = True
            name = first = reported_name(Source(path=source["path"], name=source.get("name")))
            while name in names:
                name = f"{first}-{len(names) + 1}"
            source |= {} if name == first else {"name": name}
            names.append(name)
        self.put(location, sources)
        sized = not any("weight" in source or "streaming" in source for source in sources)
        if location == "data.sources" and len(sources) > 1 and sized:
            self.put("data.temperature", 1, f"by size: {self.tool} concatenates its datasets")

    def put_held_out_share(self, key: str) -> None:
        """Translate a held-out share of documents; a number of documents cannot be translated."""
        share = self.take_number(key)
        if 0 < share <= 0.5:
            self.put("evaluation.held_out_share", share, key)
        elif share:
            self.drop(key, share, "evaluation.held_out_share is a share, at most 0.5")

    def put_attention(self, key: str, asked: Any) -> None:
        """`model.attention`: `auto` uses FlashAttention if the GPU supports it."""
        if asked:
            self.put("model.attention", ATTENTION.get(str(asked), "auto"), f"{key}: {asked}")

    def not_translated(self) -> list[str]:
        """`key: value (reason)` for everything in the config that is not in the recipe."""
        values = leaves({self.names.get(key, key): value for key, value in self.values.items()})
        left = {dotted(key): value for key, value in values if value not in (None, [], "", {})}
        missing = {key: (value, HINTS.get(key, "") if value else "") for key, value in left.items()} | self.dropped
        return [
            " ".join(f"{key}: {in_yaml(value)} {f'({reason})' if reason else ''}".split())
            for key, (value, reason) in missing.items()
        ]

    def text(self) -> str:
        """Return the recipe as YAML, each value with its original key, followed by the untranslated keys."""
        lines = [f"# Translated by `cpt import` from {self.path}, a config of {self.tool}."]
        section = ""
        for line in write_yaml({key: self.recipe[key] for key in keys_of(Recipe) if key in self.recipe}).splitlines():
            written = re.match(r"( {2})?(\w+):", line)
            if written and not written[1]:
                section = written[2]
                lines += [""] if line.endswith(":") else []
            location = "" if not written else f"{section}.{written[2]}" if written[1] else section
            comment = self.comments.get(location, "")
            fits_behind = len(line) + len(comment) + 4 <= WIDTH
            lines += [] if fits_behind or not comment else [f"{'  ' if '.' in location else ''}# {comment}"]
            lines.append(f"{line}  # {comment}" if comment and fits_behind else line)
        missing = [f"#   {line}" for line in self.not_translated()]
        return "\n".join([*lines, *(["", "# Not translated:", *missing] if missing else [])]) + "\n"


def is_on(value: Any) -> bool:
    """Both tools also accept texts such as "true"."""
    return value.lower() in ("true", "yes", "on", "1", "auto") if isinstance(value, str) else bool(value)


def target_modules(value: Any) -> Any:
    """Convert layer names for peft: LLaMA-Factory separates them by commas, with `all` for all linear layers."""
    if value in ("all", "all-linear", "all_linear"):
        return "all-linear"
    is_names = isinstance(value, str) and re.fullmatch(r"[\w.,\s]+", value)
    return [name.strip() for name in value.split(",")] if is_names else value


def is_on_the_hub(path: str) -> bool:
    return not is_local(path) and re.fullmatch(r"[\w.-]+/[\w.-]+", path) is not None


def translate_trainer_keys(config: Translation) -> None:
    """Fill in all sections except model and data, whose keys differ between the tools."""
    config.add_defaults(DEFAULTS)
    # A run's folder is `output_dir` in the tools, and `output_dir/name` here.
    place = Path(str(config.take("output_dir", config.path.stem)))
    config.put("name", re.sub(r"[^A-Za-z0-9._-]+", "-", place.name).strip("-._") or "imported")
    if len(place.parts) > 1:
        config.put("output_dir", str(place.parent))
    config.move({"seed": "seed"})
    epochs = translate_budget_and_optimizer(config)
    config.rename({"evaluation_strategy": "eval_strategy"})
    translate_interval(config, "checkpoints", "save", epochs)
    keep = config.take_number("save_total_limit")
    if "checkpoints" in config.recipe:
        config.put("checkpoints.keep", keep or None, config.names.get("save_total_limit", ""))
    if "evaluation" in config.recipe:  # held-out documents
        translate_interval(config, "evaluation", "eval", epochs)
    reported = config.take("report_to", [])
    trackers = [str(name).lower() for name in (reported if isinstance(reported, list) else [reported])]
    trackers += [name for name in ("wandb", "tensorboard", "mlflow") if config.take_switch(f"use_{name}")]
    if config.values.get("wandb_project"):
        trackers.append("wandb")
        config.move({"wandb_project": "training.project"})
    if trackers not in ([], ["none"]):
        config.put("monitoring.trackers", list(dict.fromkeys(trackers)))
    bf16, fp16 = config.take("bf16"), config.take_switch("fp16")
    is_pure = bf16 == "full" or config.take_switch("pure_bf16") or config.take_switch("bfloat16")
    if fp16 and (bf16 == "auto" or not is_on(bf16)):
        config.put("training.fp16", True)
    elif is_on(bf16) or is_pure:
        config.put("training.bf16", True, f"bf16: {bf16}" if isinstance(bf16, str) else "")
    if is_pure:
        config.put("model.dtype", "bfloat16", "weights in bfloat16")
    asked, disabled = config.take("gradient_checkpointing"), config.take_switch("disable_gradient_checkpointing")
    config.put("training.gradient_checkpointing", bool(asked) and asked != "false" and not disabled)
    liger = [key for key in [*config.values] if "liger" in key and config.take_switch(key)]
    if liger and config.recipe["stage"] in ("cpt", "pretrain", "sft"):  # other losses never need all logits
        config.put("training.use_liger_kernel", True, ", ".join(liger))
    translate_engine(config)
    # `training:` receives the remaining keys of the stage's config class.
    known = keys_of_config(STAGE_CONFIGS[config.recipe["stage"]])
    for key, value in [*config.values.items()]:
        is_fit = key in known and value is not None and any(fits(value, kind) for kind in known[key].kinds)
        if is_fit and key not in NOT_PASSED and key not in config.recipe["training"]:
            config.put(f"training.{key}", config.values.pop(key), key)


def translate_budget_and_optimizer(config: Translation) -> float:
    """Translate budget, optimizer and schedule; a warm-up in steps becomes tokens, shares stay. Return epochs."""
    step_tokens = config.gpus
    for key in ("sequence_length", "per_device_train_batch_size", "gradient_accumulation_steps"):
        number = config.take_number(key)
        step_tokens *= int(number)
        config.put(f"{'data' if key == 'sequence_length' else 'training'}.{key}", number, key)
    steps, epochs = max(0, config.take_number("max_steps")), config.take_number("num_train_epochs")
    if steps:
        how = f"max_steps: {steps} x {step_tokens:,} tokens per step on {config.gpus} GPU(s), see --gpus"
        config.put("budget.tokens", int(steps * step_tokens), how)
    else:
        config.put("budget.epochs", epochs, "num_train_epochs")
    given = config.take("optim")
    asked = "muon" if config.take_switch("use_muon") else str(given).lower()
    if asked not in OPTIMIZERS:
        config.drop("optim", given, "adamw instead; any class works: optimizer: {name: package.module:Class}")
    name = OPTIMIZERS.get(asked, "adamw")
    config.put("optimizer.name", name, f"{config.names.get('optim', 'optim')}: {asked}")
    rate = config.take_number("learning_rate")
    config.put("optimizer.learning_rate", rate or 5e-5, "learning_rate" if rate else "FILL IN: not in the config")
    config.put("optimizer.weight_decay", config.take_number("weight_decay"), "weight_decay")
    if name in TAKES_BETAS:
        betas = [config.take_number(key) for key in ("adam_beta1", "adam_beta2")]
        config.put("optimizer.betas", betas, "adam_beta1, adam_beta2")
        config.move({"adam_epsilon": "optimizer.eps", "embedding_lr": "optimizer.embedding_learning_rate"})
    asked, options = str(config.take("lr_scheduler_type")).lower(), config.take_section("lr_scheduler_kwargs")
    if asked not in SCHEDULES:
        config.drop("lr_scheduler_type", asked, "cosine instead; docs/reference/training.md lists the schedules")
    name = SCHEDULES.get(asked, "cosine")
    config.put("schedule.name", name, f"lr_scheduler_type: {asked}")
    if name != "constant":  # their default floor is 0, cpt's is 0.1
        floors = (config.take_number("cosine_min_lr_ratio"), options.pop("min_lr_rate", 0))
        config.put("schedule.floor", float(max(floors)))
    for key, value in options.items():
        config.drop(f"lr_scheduler_kwargs.{key}", value, "")
    amounts = {key: config.take_number(key) for key in ("warmup_steps", "warmup_ratio")}
    key, amount = next(((key, amount) for key, amount in amounts.items() if amount), ("", 0.0))
    if amount >= 1:
        tokens = min(amount, steps or amount) * step_tokens
        config.put("schedule.warmup_tokens", int(tokens), f"{key}: {amount}")
    elif amount and asked != "constant":
        config.put("schedule.warmup_share", amount, key)
    return epochs


def translate_interval(config: Translation, section: str, verb: str, epochs: float) -> None:
    """Translate to `every_steps`: a number of steps, or a share of the run for a number of times per epoch."""
    strategy = str(config.take(f"{verb}_strategy", "steps")).lower()
    steps, times = config.take_number(f"{verb}_steps"), config.take_number(f"{verb}s_per_epoch")
    if strategy == "epoch":
        steps, times = 0, times or 1
    if strategy in ("no", "false"):
        return
    if steps:
        config.put(f"{section}.every_steps", steps, f"{verb}_steps")
    elif times * epochs > 1:
        config.put(f"{section}.every_steps", round(1 / (times * epochs), 6), f"{times} per epoch, {epochs} epochs")


def translate_engine(config: Translation) -> None:
    """Translate DeepSpeed by an existing file, or by the stage in the name of the tool's file; FSDP becomes FSDP2."""
    given = config.take("deepspeed")
    stage = STAGE_IN_NAME.search(str(given).lower())
    if isinstance(given, dict) or given and Path(str(given)).is_file():
        profile = read_profile(given)
        if "offload_optimizer" in profile.get("zero_optimization", {}):
            given = profile | {"zero_force_ds_cpu_optimizer": False}  # keeps the recipe's optimizer
        config.put("training.deepspeed", given, "deepspeed")
    elif given and stage:
        config.put("training.deepspeed", PROFILES[stage[1]]["offload" in str(given)], f"deepspeed: {given}")
    elif given:
        config.drop("deepspeed", given, "file not found; deepspeed_configs/README.md lists the profiles of cpt")
    if config.take("fsdp") or config.values.get("fsdp_config"):  # whose options remain among the untranslated keys
        config.put("training.fsdp", True, "FSDP2")
        config.put("training.fsdp_config", {"version": 2})
