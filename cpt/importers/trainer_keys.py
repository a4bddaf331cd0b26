"""Translate what both tools take from Hugging Face's Trainer: length, optimizer, schedule, intervals, precision,
engine."""

import re
from pathlib import Path
from typing import Any

from cpt.importers.translation import Translation, is_on
from cpt.training.engine_profiles import read_profile

DEFAULTS = {
    "gradient_accumulation_steps": 1,
    "optim": "adamw_torch",
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
}
"""Of the Trainer, where cpt has others."""
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
PROFILES = {"1": (ZERO_1, ZERO_1), "2": (ZERO_1, ZERO_2_OFFLOAD), "3": (ZERO_3, ZERO_3_OFFLOAD)}
"""ZeRO stage -> profile without and with offload. ZeRO-2 without offload has none of its own."""
STAGE_IN_NAME = re.compile(r"z(?:ero)?([123])")


def translate_trainer_keys(config: Translation) -> None:
    """Fill in every section but the model and the data, whose keys each tool has its own names for."""
    config.add_defaults(DEFAULTS)
    translate_name(config)
    config.move({"seed": "seed"})
    step_tokens, steps, epochs = translate_length(config)
    translate_optimizer(config)
    translate_schedule(config, step_tokens, steps)
    translate_intervals(config, epochs)
    translate_trackers(config)
    translate_precision(config)
    translate_recomputation(config)
    translate_engine(config)


def translate_name(config: Translation) -> None:
    """The folder of a run is `output_dir` in the tools, and `output_dir/name` here."""
    place = Path(str(config.take("output_dir", config.path.stem)))
    config.put("name", re.sub(r"[^A-Za-z0-9._-]+", "-", place.name).strip("-._") or "imported")
    if len(place.parts) > 1:
        config.put("output_dir", str(place.parent))


def translate_length(config: Translation) -> tuple[int, float, float]:
    """Micro-batch, accumulation and budget; returns tokens per step, steps (0: counted in epochs) and epochs."""
    step_tokens = config.gpus
    for key in ("sequence_length", "per_device_train_batch_size", "gradient_accumulation_steps"):
        number = config.take_number(key)
        step_tokens *= int(number)
        config.put(f"{'data' if key == 'sequence_length' else 'training'}.{key}", number, config.names.get(key, key))
    steps, epochs = max(0, config.take_number("max_steps")), config.take_number("num_train_epochs")
    if steps:
        how = f"max_steps: {steps} x {step_tokens:,} tokens per step on {config.gpus} GPU(s), see --gpus"
        config.put("budget.tokens", int(steps * step_tokens), how)
    else:
        config.put("budget.epochs", epochs, config.names.get("num_train_epochs", "num_train_epochs"))
    return step_tokens, steps, epochs


def translate_optimizer(config: Translation) -> None:
    """Name, learning rate, weight decay, betas."""
    given = config.take("optim")
    asked = "muon" if config.take_switch("use_muon") else str(given).lower()
    if asked not in OPTIMIZERS:
        config.drop("optim", given, "adamw instead; any class works: optimizer: {name: package.module:Class}")
    name = OPTIMIZERS.get(asked, "adamw")
    config.put("optimizer.name", name, f"{config.names.get('optim', 'optim')}: {asked}")
    rate = config.take_number("learning_rate")
    config.put("optimizer.learning_rate", rate or 5e-5, "learning_rate" if rate else "FILL IN: the config has none")
    config.put("optimizer.weight_decay", config.take_number("weight_decay"), config.names.get("weight_decay", ""))
    if name in TAKES_BETAS:
        betas = [config.take_number(key) for key in ("adam_beta1", "adam_beta2")]
        config.put("optimizer.betas", betas, "adam_beta1, adam_beta2")
        config.move({"adam_epsilon": "optimizer.eps", "embedding_lr": "optimizer.embedding_learning_rate"})


def translate_schedule(config: Translation, step_tokens: int, steps: float) -> None:
    """Name, floor, and the warm-up: a number of steps becomes tokens, a share stays one."""
    asked, options = str(config.take("lr_scheduler_type")).lower(), config.take_section("lr_scheduler_kwargs")
    if asked not in SCHEDULES:
        config.drop("lr_scheduler_type", asked, "cosine instead; docs/optimizers.md lists the schedules")
    name = SCHEDULES.get(asked, "cosine")
    config.put("schedule.name", name, f"lr_scheduler_type: {asked}")
    if name != "constant":  # the floor is 0 by default there, 0.1 in cpt
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
        config.put("schedule.warmup_share", amount, config.names.get(key, key))


def translate_intervals(config: Translation, epochs: float) -> None:
    """When checkpoints are written, how many stay, and when held-out documents, if there are any, are evaluated."""
    config.rename({"evaluation_strategy": "eval_strategy"})
    translate_interval(config, "checkpoints", "save", epochs)
    keep = config.take_number("save_total_limit")
    if "checkpoints" in config.recipe:
        config.put("checkpoints.keep", keep or None, config.names.get("save_total_limit", ""))
    if "evaluation" in config.recipe:
        translate_interval(config, "evaluation", "eval", epochs)


def translate_interval(config: Translation, section: str, verb: str, epochs: float) -> None:
    """`every_steps`: a number of steps, or a share of the run for so many times per epoch."""
    strategy = str(config.take(f"{verb}_strategy", "steps")).lower()
    steps, times = config.take_number(f"{verb}_steps"), config.take_number(f"{verb}s_per_epoch")
    if strategy == "epoch":
        steps, times = 0, times or 1
    if strategy in ("no", "false"):
        return
    if steps:
        config.put(f"{section}.every_steps", steps, config.names.get(f"{verb}_steps", f"{verb}_steps"))
    elif times * epochs > 1:
        config.put(f"{section}.every_steps", round(1 / (times * epochs), 6), f"{times} per epoch, {epochs} epochs")


def translate_trackers(config: Translation) -> None:
    """Trackers and the project's name."""
    reported = config.take("report_to", [])
    trackers = [str(name).lower() for name in (reported if isinstance(reported, list) else [reported])]
    trackers += [name for name in ("wandb", "tensorboard", "mlflow") if config.take_switch(f"use_{name}")]
    if config.values.get("wandb_project"):
        trackers.append("wandb")
        config.move({"wandb_project": "training.project"})
    if trackers not in ([], ["none"]):
        config.put("monitoring.trackers", list(dict.fromkeys(trackers)))


def translate_precision(config: Translation) -> None:
    """bf16, fp16, and weights in bfloat16."""
    bf16, fp16 = config.take("bf16"), config.take_switch("fp16")
    pure = bf16 == "full" or config.take_switch("pure_bf16") or config.take_switch("bfloat16")
    if fp16 and (bf16 == "auto" or not is_on(bf16)):
        config.put("training.fp16", True)
    elif is_on(bf16) or pure:
        config.put("training.bf16", True, f"bf16: {bf16}" if isinstance(bf16, str) else "")
    if pure:
        config.put("model.dtype", "bfloat16", "weights in bfloat16")


def translate_recomputation(config: Translation) -> None:
    """Recomputed activations; Liger's kernels."""
    asked, disabled = config.take("gradient_checkpointing"), config.take_switch("disable_gradient_checkpointing")
    config.put("training.gradient_checkpointing", bool(asked) and asked != "false" and not disabled)
    liger = [key for key in [*config.values] if "liger" in key and config.take_switch(key)]
    if liger and config.recipe["stage"] in ("cpt", "pretrain", "sft"):  # other losses read no whole logits anyway
        config.put("training.use_liger_kernel", True, ", ".join(liger))


def translate_engine(config: Translation) -> None:
    """DeepSpeed by a file that is here, else by the stage in the name of the tool's own file; FSDP as FSDP2."""
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
        config.drop("deepspeed", given, "no such file; deepspeed_configs/README.md lists the profiles of cpt")
    fsdp, options = config.take("fsdp"), config.take_section("fsdp_config")
    if fsdp or options:
        config.put("training.fsdp", True, "FSDP2")
        config.put("training.fsdp_config", {"version": 2})
        for key, value in options.items():
            config.drop(f"fsdp_config.{key}", value, "")


def put_attention(config: Translation, key: str, asked: Any) -> None:
    """`model.attention`: `auto` takes FlashAttention where the GPU has it."""
    if asked:
        config.put("model.attention", ATTENTION.get(str(asked), "auto"), f"{key}: {asked}")
