"""Translate another tool's config: untranslated keys, the recipe so far, and the Trainer's keys."""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from cpt.errors import RecipeError
from cpt.plugins import fits
from cpt.recipe.huggingface_keys import PEFT_METHODS, STAGE_CONFIGS, keys_of_config
from cpt.recipe.keys import keys_of
from cpt.recipe.paths import is_local
from cpt.recipe.rules import reported_name
from cpt.recipe.schema import Recipe, Source
from cpt.recipe.training_keys import fate_of
from cpt.recipe.tree import dotted, leaves
from cpt.recipe.values import in_yaml, write_yaml

MULTIMODAL = "cpt trains on text only; this config is for images, audio or video"
MULTIMODAL_KEY = re.compile(
    r"(?:image|video|audio|vision|vit|mm|multimodal)_|media_dir$|processor_type$"
)
# in the last part of a name: Qwen2-VL, InternVL3, llava_next, Llama-3.2-11B-Vision
MULTIMODAL_NAME = re.compile(
    r"(?<![a-z])(?:[a-z]*vlm?\d*|llava|bakllava|pixtral|mllama|vision|paligemma\d*|idefics\d*|omni|audio)(?![a-z])",
    re.IGNORECASE,
)
NAMES = ("base_model", "model_name_or_path", "model", "model_type", "template", "chat_template")
MERGE = "merge it first, cpt merge --method lora BASE ADAPTER --output FOLDER, and set model.path to FOLDER"
OWN_TEMPLATE = "the tokenizer's template is used; for another one, save a tokenizer with it and set tokenizer.path"
PARALLEL = (
    "sequence_parallel_size",
    "context_parallel_size",
    "tensor_parallel_size",
    "expert_parallel_size",
    "fp8",
)
HINTS = {  # common key that is not translated -> replacement
    "trust_remote_code": "set model.revision to a commit that you have read, and model.trust_remote_code: true",
    **dict.fromkeys(("chat_template", "template"), OWN_TEMPLATE),
    **dict.fromkeys(
        ("early_stopping_patience", "early_stopping_steps"),
        "write evaluation.stop: {set: NAME, patience: 3}, with the name of a held-out set",
    ),
    "columns": "name them in data.sources[].chat, or in text_column",
    **dict.fromkeys(("train_on_inputs", "train_on_prompt"), "stage cpt trains on all tokens"),
    "special_tokens.pad_token": "not needed: padding is masked",
    **dict.fromkeys(
        ("unfrozen_parameters", "freeze_trainable_layers"), "all are trained; see model.train_only"
    ),
    **dict.fromkeys(("adapter_name_or_path", "lora_model_dir", "adapters", "peft_model_id"), MERGE),
    **dict.fromkeys(PARALLEL, "see docs/explanation/planning.md"),
}
MODEL = {
    "model_name_or_path": "model.path",
    "model_revision": "model.revision",
    "tokenizer_name": "tokenizer.path",
    "resize_vocab": "model.resize_embeddings",
}
LORA = (
    "r",
    "lora_alpha",
    "lora_dropout",
    "target_modules",
    "modules_to_save",
    "use_dora",
    "use_rslora",
)
DEFAULTS = {  # defaults of the Trainer that differ in cpt
    "gradient_accumulation_steps": 1,
    "optim": "adamw_torch",
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
}
OPTIMIZERS = {
    **dict.fromkeys(("adamw", "adamw_hf", "adamw_torch", "adamw_torch_fused"), "adamw"),
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "adamw_torch_8bit"), "adamw_8bit"),
    **{name: name for name in ("paged_adamw_8bit", "paged_adamw_32bit", "muon", "sgd")},
}
ATTENTION = {
    "eager": "eager",
    "disabled": "eager",
    "sdpa": "sdpa",
    "flex_attention": "flex_attention",
}
# ZeRO stage -> profile. ZeRO-2 without offload uses ZeRO-1's.
PROFILES = {"1": "zero1", "2": "zero1", "3": "production"}
OFFLOADING_PROFILES = {"1": "zero1", "2": "prototype", "3": "8b_24gb"}
STAGE_IN_NAME = re.compile(
    r"(?<![a-z])(?:ds_?)?z(?:ero)?[_-]?(?:stage[_-]?)?([123])(?!\d)|stage[_-]?([123])(?!\d)"
)

Sources = list[dict[str, Any]]


@dataclass
class Translation:
    """`take` removes a key from the config, `put` writes it into the recipe; the remaining keys are not translated."""

    path: Path
    tool: str
    values: dict[str, Any]
    lines: Mapping[str, int]  # top-level key -> its line in the config
    gpus: int = 1  # GPUs of the original run, to convert steps
    recipe: dict[str, Any] = field(default_factory=lambda: {"training": {}})
    comments: dict[str, str] = field(
        default_factory=dict
    )  # location in the recipe -> the original key, or a reason
    dropped: dict[str, tuple[Any, str]] = field(
        default_factory=dict
    )  # key not translated -> its value and the reason
    names: dict[str, str] = field(
        default_factory=dict
    )  # key -> its spelling in the config, or `axolotl's default`

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
        value = self.values.pop(key, None)
        if value is None:
            return default
        return value

    def take_switch(self, key: str) -> bool:
        return is_on(self.take(key))

    def take_number(self, key: str) -> float:
        """Take a number, also written as text: `"1e-5"`; 0 if it is missing."""
        number_given = self.take(key, 0)
        try:
            number = float(number_given)
        except (TypeError, ValueError) as problem:
            raise self.error(key, f"expected a number, got {in_yaml(number_given)}") from problem
        if number.is_integer():
            return int(number)
        return number

    def error(self, key: str, problem: str) -> RecipeError:
        name = self.names.get(key, key)
        return RecipeError(f"{self.path}:{self.lines.get(name, 1)}: {name}: {problem}")

    def refuse(self, reasons: Mapping[str, str]) -> None:
        """Raise an error for a key that makes this another kind of training: key -> what it needs."""
        for key, reason in reasons.items():
            if self.values.get(key) not in (None, False, "", "false"):
                raise self.error(key, reason)

    def refuse_multimodal(self) -> None:
        """Raise an error for the keys, models and templates of images, audio and video."""
        self.refuse({key: MULTIMODAL for key in self.values if MULTIMODAL_KEY.match(key)})
        for key in NAMES:
            name = PurePosixPath(str(self.values.get(key, ""))).name
            if MULTIMODAL_NAME.search(name):
                raise self.error(key, MULTIMODAL)

    def put(self, location: str, value: Any, comment: str = "") -> None:
        """Write `put("optimizer.learning_rate", 1e-5, "lr")`; the comment is the original key, or a reason."""
        *sections, key = location.split(".")
        mapping = self.recipe
        for section in sections:
            mapping = mapping.setdefault(section, {})
        mapping[key] = value
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

    def put_data(
        self, key: str, trained: Sources, held_out: Sources, weights: str, share: str, streams: bool
    ) -> None:
        """Write the sources; `key`, `weights`, `share`: the tool's keys of datasets, mixture and held-out share."""
        if not trained:
            raise RecipeError(f"{self.path}: `{key}` is missing. Set the data to train on")
        weights_given = words_in(self.take(weights, []))
        if weights_given:
            weighted = []
            for source, word in zip(trained, weights_given, strict=True):
                weighted.append({**source, "weight": float(word)})
            trained = weighted
        if streams:
            streamed = []
            for source in trained:
                if is_on_the_hub(source["path"]):
                    source = source | {"streaming": True}
                streamed.append(source)
            trained = streamed
        self.put("data.sources", with_names(trained))
        sized = not any("weight" in source or "streaming" in source for source in trained)
        if len(trained) > 1 and sized:
            self.put("data.temperature", 1, f"by size: {self.tool} concatenates its datasets")
        if held_out:
            self.put("evaluation.perplexity", with_names(held_out))
        part = self.take_number(share)
        if 0 < part <= 0.5:
            self.put("evaluation.held_out_share", part, share)
        elif part:
            self.drop(share, part, "evaluation.held_out_share is a share, at most 0.5")

    def put_rewards(self, names: Mapping[str, str]) -> None:
        """Translate a reward model, or `reward_funcs`; `names`: the tool's name of a function -> cpt's."""
        paths = words_in(self.take("reward_model", []))
        functions = words_in(self.take("reward_funcs", []))
        rewards = [{"name": "reward_model", "path": path} for path in paths]
        functions = [names.get(name, ":".join(name.rsplit(".", 1))) for name in functions]
        weights = self.take("reward_weights", [1.0] * len(functions))
        for name, weight in zip(functions, weights, strict=True):
            rewards.append({"name": name, "weight": weight})
        if rewards:
            comment = "reward_model, reward_funcs"
        else:
            comment = "FILL IN: see docs/reference/training.md"
        self.put("rewards", rewards or [{"name": "exact_match"}], comment)

    def not_translated(self) -> list[str]:
        """`key: value (reason)` for everything in the config that is not in the recipe."""
        values = leaves({self.names.get(key, key): value for key, value in self.values.items()})
        left = {dotted(key): value for key, value in values if value not in (None, [], "", {})}
        missing = {}
        for key, value in left.items():
            hint = HINTS.get(key, "") if value else ""
            missing[key] = (value, hint)
        missing |= self.dropped
        lines = []
        for key, (value, reason) in missing.items():
            line = f"{key}: {in_yaml(value)}"
            if reason:
                line += f" ({reason})"
            lines.append(" ".join(line.split()))
        return lines

    def text(self) -> str:
        """Return the recipe as YAML, each value with its original key, followed by the untranslated keys."""
        lines = [f"# Translated by `cpt import` from {self.path}, a config of {self.tool}."]
        section = ""
        for line in write_yaml(
            {key: self.recipe[key] for key in keys_of(Recipe) if key in self.recipe}
        ).splitlines():
            match = re.match(r"( {2})?(\w+):", line)
            if match and not match[1]:
                section = match[2]
                lines += [""] if line.endswith(":") else []
            if not match:
                location = ""
            elif match[1]:
                location = f"{section}.{match[2]}"
            else:
                location = section
            comment = self.comments.get(location, "")
            lines.append(f"{line}  # {comment}" if comment else line)
        missing = [f"#   {line}" for line in self.not_translated()]
        return "\n".join([*lines, *(["", "# Not translated:", *missing] if missing else [])]) + "\n"


def is_on(value: Any) -> bool:
    """Both tools also accept texts such as "true"."""
    if isinstance(value, str):
        return value.lower() in ("true", "yes", "on", "1", "auto")
    return bool(value)


def with_names(sources: Sources) -> Sources:
    """Number the sources of the same name."""
    names = Counter[str]()
    for source in sources:
        name = reported_name(Source(path=source["path"], name=source.get("name")))
        names[name] += 1
        source |= {"name": f"{name}-{names[name]}"} if names[name] > 1 else {}
    return sources


def words_in(value: Any) -> list[str]:
    """Split words at commas; accept a list, too."""
    modules = value if isinstance(value, list) else str(value).split(",")
    return [str(word).strip() for word in modules if str(word).strip()]


def is_on_the_hub(path: str) -> bool:
    return not is_local(path) and re.fullmatch(r"[\w.-]+/[\w.-]+", path) is not None


def translate_model(config: Translation) -> None:
    """Fill in `model` from the names that transformers and peft use, and `adapter`, the kind of training."""
    config.move(MODEL)
    if implementation := config.take(
        "attn_implementation"
    ):  # `auto` uses FlashAttention if the GPU supports it
        comment = (
            f"{config.names.get('attn_implementation', 'attn_implementation')}: {implementation}"
        )
        config.put("model.attention", ATTENTION.get(str(implementation), "auto"), comment)
    adapter = str(config.take("adapter", "full")).lower()
    if adapter in ("lora", "qlora"):
        config.put("model.lora", {})
        config.move({option: f"model.lora.{option}" for option in LORA})
        lora = config.recipe["model"]["lora"]
        for key in ("target_modules", "modules_to_save"):
            if isinstance(lora.get(key), list) or re.fullmatch(
                r"[\w.,\s-]+", str(lora.get(key, ""))
            ):
                names = words_in(lora[key])
                lora[key] = (
                    "all-linear" if names[0].replace("_", "-") in ("all", "all-linear") else names
                )
        bits = config.take("quantization_bit")
        if config.take_switch("load_in_4bit") or adapter == "qlora" or bits == 4:
            lora |= {"quantize": "nf4", "double_quantize": True}
        elif config.take_switch("load_in_8bit") or bits == 8:
            lora["quantize"] = "int8"
    elif adapter in PEFT_METHODS:
        config.put("model.lora", {"method": adapter}, "adapter")
        options = [
            key for key in keys_of_config(PEFT_METHODS[adapter]) if key.startswith(f"{adapter}_")
        ]
        config.move({key: f"model.lora.{key}" for key in options})
    elif adapter not in ("full", ""):
        config.drop("adapter", adapter, "all parameters are trained; see model.lora")


def translate_shared_keys(config: Translation) -> None:
    """Fill in all sections except the data, from the names that Hugging Face's classes use."""
    translate_model(config)
    config.add_defaults(DEFAULTS)
    # A run's folder is `output_dir` in the tools, and `output_dir/name` here.
    output_folder = Path(str(config.take("output_dir", config.path.stem)))
    config.put(
        "name", re.sub(r"[^A-Za-z0-9._-]+", "-", output_folder.name).strip("-._") or "imported"
    )
    if len(output_folder.parts) > 1:
        config.put("output_dir", str(output_folder.parent))
    config.move({"seed": "seed"})
    epochs = translate_budget_and_optimizer(config)
    config.rename({"evaluation_strategy": "eval_strategy"})
    translate_interval(config, "checkpoints", "save", epochs)
    keep = config.take_number("save_total_limit")
    if "checkpoints" in config.recipe:
        config.put("checkpoints.keep", keep or None, config.names.get("save_total_limit", ""))
    if "evaluation" in config.recipe:  # held-out documents
        translate_interval(config, "evaluation", "eval", epochs)
    trackers = [name.lower() for name in words_in(config.take("report_to", []))]
    if config.values.get("wandb_project"):
        trackers.append("wandb")
        config.move({"wandb_project": "training.project"})
    if trackers not in ([], ["none"]):
        config.put("monitoring.trackers", list(dict.fromkeys(trackers)))
    bf16 = config.take("bf16")
    fp16 = config.take_switch("fp16")
    is_pure = bf16 == "full" or config.take_switch("pure_bf16") or config.take_switch("bfloat16")
    if fp16 and (bf16 == "auto" or not is_on(bf16)):
        config.put("training.fp16", True)
    elif is_on(bf16) or is_pure:
        config.put("training.bf16", True, f"bf16: {bf16}" if isinstance(bf16, str) else "")
    if is_pure:
        config.put("model.dtype", "bfloat16", "weights in bfloat16")
    setting = config.take("gradient_checkpointing")
    disabled = config.take_switch("disable_gradient_checkpointing")
    config.put(
        "training.gradient_checkpointing", bool(setting) and setting != "false" and not disabled
    )
    liger = [key for key in [*config.values] if "liger" in key and config.take_switch(key)]
    if liger and config.recipe["stage"] in (
        "cpt",
        "pretrain",
        "sft",
    ):  # other losses never need all logits
        config.put("training.use_liger_kernel", True, ", ".join(liger))
    translate_engine(config)
    # `training:` receives the remaining keys of the stage's config class.
    stage = config.recipe["stage"]
    accepted_keys = keys_of_config(STAGE_CONFIGS[stage])
    for key, value in [*config.values.items()]:
        is_fit = (
            key in accepted_keys
            and value is not None
            and any(fits(value, kind) for kind in accepted_keys[key].kinds)
        )
        is_used = fate_of(key, stage) in ("passed on", "ours")
        if is_fit and is_used and key not in config.recipe["training"]:
            config.put(f"training.{key}", config.values.pop(key), key)


def translate_budget_and_optimizer(config: Translation) -> float:
    """Translate budget, optimizer and schedule; a warm-up in steps becomes tokens, shares stay. Return epochs."""
    step_tokens = config.gpus
    for key in ("sequence_length", "per_device_train_batch_size", "gradient_accumulation_steps"):
        number = config.take_number(key)
        step_tokens *= int(number)
        config.put(f"{'data' if key == 'sequence_length' else 'training'}.{key}", number, key)
    steps = max(0, config.take_number("max_steps"))
    epochs = config.take_number("num_train_epochs")
    if steps:
        comment = f"max_steps: {steps} x {step_tokens:,} tokens per step on {config.gpus} GPU(s), see --gpus"
        config.put("budget.tokens", int(steps * step_tokens), comment)
    else:
        config.put("budget.epochs", epochs, "num_train_epochs")
    name_as_written = config.take("optim")
    requested = "muon" if config.take_switch("use_muon") else str(name_as_written).lower()
    if requested not in OPTIMIZERS:
        config.drop(
            "optim",
            name_as_written,
            "adamw instead; any class works: optimizer: {name: package.module:Class}",
        )
    name = OPTIMIZERS.get(requested, "adamw")
    config.put("optimizer.name", name, f"{config.names.get('optim', 'optim')}: {requested}")
    rate = config.take_number("learning_rate")
    config.put(
        "optimizer.learning_rate",
        rate or 5e-5,
        "learning_rate" if rate else "FILL IN: not in the config",
    )
    config.put("optimizer.weight_decay", config.take_number("weight_decay"), "weight_decay")
    if name != "sgd":
        betas = list(map(config.take_number, ("adam_beta1", "adam_beta2")))
        config.put("optimizer.betas", betas, "adam_beta1, adam_beta2")
        config.move(
            {"adam_epsilon": "optimizer.eps", "embedding_lr": "optimizer.embedding_learning_rate"}
        )
    requested = str(config.take("lr_scheduler_type")).lower()
    name = requested.partition("_with_")[0]  # constant_with_warmup, cosine_with_min_lr
    if name not in ("constant", "cosine", "linear"):
        config.drop(
            "lr_scheduler_type",
            requested,
            "cosine instead; docs/reference/training.md lists the schedules",
        )
        name = "cosine"
    config.put("schedule.name", name, f"lr_scheduler_type: {requested}")
    if name != "constant":  # their default floor is 0, cpt's is 0.1
        config.put("schedule.floor", config.take_number("cosine_min_lr_ratio"))
    amounts = {key: config.take_number(key) for key in ("warmup_steps", "warmup_ratio")}
    key, amount = next(((key, amount) for key, amount in amounts.items() if amount), ("", 0.0))
    if amount >= 1:
        tokens = min(amount, steps or amount) * step_tokens
        config.put("schedule.warmup_tokens", int(tokens), f"{key}: {amount}")
    elif amount and requested != "constant":
        config.put("schedule.warmup_share", amount, key)
    return epochs


def translate_interval(config: Translation, section: str, verb: str, epochs: float) -> None:
    """Translate to `every_steps`: a number of steps, or a share of the run for a number of times per epoch."""
    strategy = str(config.take(f"{verb}_strategy", "steps")).lower()
    steps = config.take_number(f"{verb}_steps")
    times = config.take_number(f"{verb}s_per_epoch")
    if strategy == "epoch":
        steps = 0
        times = times or 1
    if strategy in ("no", "false"):
        return
    if steps > 0:
        config.put(f"{section}.every_steps", steps, f"{verb}_steps")
    elif times * epochs > 1:
        config.put(
            f"{section}.every_steps",
            round(1 / (times * epochs), 6),
            f"{times} per epoch, {epochs} epochs",
        )


def translate_engine(config: Translation) -> None:
    """Translate DeepSpeed by an existing file, or by the stage in the name of the tool's file; FSDP becomes FSDP2."""
    profile_given = config.take("deepspeed")
    path = PurePosixPath(str(profile_given))
    name = path.name.lower()  # not the folders: one may be a user's name
    stage = STAGE_IN_NAME.search(name)
    if isinstance(profile_given, dict) or profile_given and Path(str(profile_given)).is_file():
        config.put("training.deepspeed", profile_given)
    elif profile_given and stage:
        profiles = OFFLOADING_PROFILES if "offload" in name else PROFILES
        profile = profiles[stage[1] or stage[2]]
        config.put(
            "training.deepspeed",
            f"deepspeed_configs/ds_config_{profile}.json",
            f"deepspeed: {profile_given}",
        )
    elif profile_given:
        config.drop(
            "deepspeed",
            profile_given,
            "file not found; deepspeed_configs/README.md lists the profiles of cpt",
        )
    options = dict(config.take("fsdp_config", {}))
    if config.take("fsdp") or options:
        switches = []
        for key in ("offload_params", "activation_checkpointing"):
            switches.append(is_on(options.pop(f"fsdp_{key}", options.pop(key, False))))
        offload, recompute = switches
        config.put("training.fsdp", True, "FSDP2")
        config.put(
            "training.fsdp_config", {"version": 2} | ({"cpu_offload": True} if offload else {})
        )
        if recompute:
            config.put(
                "training.gradient_checkpointing", True, "fsdp_config.activation_checkpointing"
            )
        config.values["fsdp_config"] = options
