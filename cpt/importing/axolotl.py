"""From an axolotl config to a recipe."""

from collections.abc import Mapping
from typing import Any

from cpt.importing.axolotl_data import stage_of, write_sources
from cpt.importing.axolotl_keys import HANDLED, IDLE, KNOWN, NOT, PASSED
from cpt.importing.conflicts import resolve_conflicts
from cpt.importing.dialect import AXOLOTL
from cpt.importing.engines import write_engines
from cpt.importing.learning import write_optimizer, write_schedule
from cpt.importing.ledger import OFF, Ledger
from cpt.importing.lengths import write_lengths
from cpt.importing.model import (
    starts_from_weights,
    targets,
    without_adapter,
    write_adapter,
    write_attention,
    write_checkpointing,
    write_liger,
    write_precision,
    write_trust,
)
from cpt.importing.rest import enter_the_rest
from cpt.importing.rewards import write_rewards
from cpt.importing.tokens import write_special_tokens, write_template
from cpt.importing.watching import write_evaluation, write_name, write_saving, write_tracking

LORA = {
    "lora_r": "r",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "lora_target_modules": "target_modules",
    "lora_target_parameters": "target_parameters",
    "lora_modules_to_save": "modules_to_save",
    "lora_fan_in_fan_out": "fan_in_fan_out",
    "lora_rank_pattern": "rank_pattern",
    "lora_alpha_pattern": "alpha_pattern",
    "peft_use_dora": "use_dora",
    "peft_use_rslora": "use_rslora",
    "peft_layers_to_transform": "layers_to_transform",
    "peft_layers_pattern": "layers_pattern",
    "peft_init_lora_weights": "init_lora_weights",
}
"""Key -> option of peft."""
FLAGS = {
    "flash_attention": "flash_attention_2",
    "sdp_attention": "sdpa",
    "eager_attention": "eager",
    "flex_attention": "flex_attention",
}
OFFLOADING = ("offload", "offload_disk", "unsloth")
"""Values of `gradient_checkpointing` that move activations to host memory or disk."""
LIGER = {
    "liger_rope": "rope",
    "liger_rms_norm": "rms_norm",
    "liger_swiglu": "swiglu",
    "liger_glu_activation": "swiglu",
    "liger_cross_entropy": "cross_entropy",
    "liger_fused_linear_cross_entropy": "fused_linear_cross_entropy",
}
"""Key -> argument of Liger."""


def import_axolotl(ledger: Ledger) -> None:
    """Fill the ledger's recipe; the order of the sections is that of this function."""
    stage = stage_of(ledger)
    write_name(ledger)
    ledger.put("stage", stage)
    write_stage(ledger, stage)
    if ledger.value("seed") is not None:
        ledger.carry("seed", "seed", int(ledger.number("seed") or 0))
    write_model(ledger)
    ledger.put("data.sequence_length", None)
    write_packing(ledger, stage)
    write_sources(ledger, stage)
    lengths = write_lengths(ledger, AXOLOTL)
    write_optimizer(ledger, AXOLOTL)
    write_embedding_rate(ledger)
    write_schedule(ledger, AXOLOTL, lengths)
    write_saving(ledger, AXOLOTL, lengths)
    write_evaluation(ledger, AXOLOTL, lengths)
    write_tracking(ledger)
    write_profile(ledger)
    write_precision(ledger)
    write_recomputing(ledger)
    write_liger_kernels(ledger)
    write_engines(ledger)
    resolve_conflicts(ledger)
    write_rewards(ledger, stage)
    write_special_tokens(ledger, "special_tokens")
    write_template(ledger, "chat_template", stage, own=("tokenizer_default",))
    ledger.skip_empty(["plugins"])
    ledger.otherwise("plugins", "what a plugin is for is said by its keys")
    enter_the_rest(ledger, handled=HANDLED, passed=PASSED, idle=IDLE, dropped=NOT, known=KNOWN)


def write_stage(ledger: Ledger, stage: str) -> None:
    """The keys that decided it."""
    ledger.skip_empty(["rl", "reward_model", "train_on_inputs"])
    rl = str(ledger.value("rl", "")).lower()
    if rl in ("ipo", "simpo"):
        ledger.put("training.loss_type", ["ipo"] if rl == "ipo" else "simpo", f"rl: {rl}")
        ledger.otherwise("rl", f"stage: {stage}, with training.loss_type")
    elif rl == "gdpo":
        ledger.put("training.multi_objective_aggregation", "normalize_then_sum", "rl: gdpo")
        ledger.otherwise("rl", "stage: grpo, with training.multi_objective_aggregation")
    elif rl and stage != rl:
        ledger.drop(
            "rl",
            f"there is no stage for `{rl}`; the recipe says `stage: {stage}`. docs/stages.md names those there are",
        )
    ledger.enter("rl", "carried", f"stage: {stage}")
    if ledger.value("num_labels") == 1:
        ledger.enter("num_labels", "carried", "a reward model has one output")
    ledger.enter(
        "reward_model", "carried", "stage: reward" if stage == "reward" else "rl decides there too" if rl else OFF
    )
    if not ledger.is_on("train_on_inputs"):
        ledger.enter("train_on_inputs", "carried", OFF)
    elif stage == "cpt":
        ledger.otherwise("train_on_inputs", "stage: cpt, which learns every token of a text or a conversation")
    ledger.drop(
        "train_on_inputs",
        "stage `sft` learns the answers alone. Conversations in `messages` are learned whole by `stage: cpt`",
    )


def write_model(ledger: Ledger) -> None:
    """Base, tokenizer, attention and adapter."""
    ledger.carry("base_model", "model.path")
    for key in ("revision_of_model", "model_revision"):
        if ledger.value(key):
            ledger.carry(key, "model.revision", str(ledger.value(key)))
    write_trust(ledger)
    if ledger.value("tokenizer_config"):
        ledger.carry("tokenizer_config", "tokenizer.path", str(ledger.value("tokenizer_config")))
    for key in ("random_init_weights", "reinit_weights"):
        if ledger.is_on(key):
            ledger.carry(key, "model.from_scratch", True)
            ledger.put("stage", "pretrain" if ledger.recipe["stage"] == "cpt" else ledger.recipe["stage"], key)
    if ledger.is_on("resize_token_embeddings_to_32x"):
        ledger.put("model.resize_embeddings", True, "resize_token_embeddings_to_32x")
        ledger.otherwise("resize_token_embeddings_to_32x", "model.resize_embeddings: true, to the tokenizer's size")
    write_rope(ledger)
    for key, name in FLAGS.items():
        if ledger.is_on(key):
            write_attention(ledger, key, name)
    if ledger.value("attn_implementation"):
        write_attention(ledger, "attn_implementation", str(ledger.value("attn_implementation")))
    write_lora(ledger)


def write_rope(ledger: Ledger) -> None:
    """Of the overrides of the model's config, those of its positions."""
    for key in ("overrides_of_model_config", "model_config"):
        overrides = ledger.section(key)
        ledger.skip_empty([key])
        rope: dict[str, Any] = {}
        for name, value in overrides.items():
            if name == "rope_theta":
                rope["theta"] = ledger.as_number(f"{key}.{name}", value)
            elif name == "rope_scaling" and isinstance(value, Mapping) and value.get("factor"):
                factor = ledger.as_number(f"{key}.{name}", value["factor"])
                rope |= {"type": str(value.get("type") or value.get("rope_type") or "linear"), "factor": factor}
            else:
                ledger.drop(
                    f"{key}.{name}", "the weights' own config counts; of it, `model.rope` changes the positions"
                )
                continue
            ledger.otherwise(f"{key}.{name}", "model.rope")
        if rope:
            ledger.put("model.rope", rope, key)
        if not overrides:
            ledger.enter(key, "carried", "empty there")


def write_lora(ledger: Ledger) -> None:
    """Adapters, with the base in 4 bit where asked."""
    adapter = str(ledger.value("adapter") or "").lower()
    ledger.skip_empty(["adapter", "lora_target_linear", "bnb_config_kwargs", *LORA])
    keys = [*LORA, "lora_target_linear"]
    if adapter not in ("lora", "qlora"):
        ledger.drop(
            "adapter",
            f"there is no `{adapter}` here, and all parameters would learn: write `model.lora` (docs/adapters.md)",
        )
        without_adapter(ledger, [*keys, "load_in_4bit", "bnb_config_kwargs"])
        return
    if not starts_from_weights(ledger, [*keys, "load_in_4bit", "bnb_config_kwargs"], "adapter"):
        return
    used = {key: option for key, option in LORA.items() if ledger.value(key) not in (None, [], "", False)}
    options = {option: ledger.value(key) for key, option in used.items()}
    if "target_modules" in options:
        options["target_modules"] = targets(options["target_modules"])
    if ledger.is_on("lora_target_linear"):
        options["target_modules"] = "all-linear"
        ledger.enter("lora_target_linear", "carried", "model.lora.target_modules: all-linear")
        ledger.otherwise("lora_target_modules", "lora_target_linear decides")
    write_adapter(ledger, options, used)
    if ledger.is_on("load_in_4bit") or adapter == "qlora":
        options |= quantization(ledger)
        ledger.enter("load_in_4bit", "carried", f"model.lora.quantize: {options['quantize']}")
    for key in [*keys, "load_in_4bit"]:
        ledger.enter(key, "carried", OFF)
    ledger.enter("adapter", "carried", "model.lora")
    ledger.otherwise("bnb_config_kwargs", "model.lora.quantize and .double_quantize")


def quantization(ledger: Ledger) -> dict[str, Any]:
    """How the base is kept in 4 bit."""
    given = ledger.section("bnb_config_kwargs")
    kind = str(given.get("bnb_4bit_quant_type") or "nf4")
    return {
        "quantize": kind if kind in ("nf4", "fp4") else "nf4",
        "double_quantize": bool(given.get("bnb_4bit_use_double_quant", True)),
    }


def write_packing(ledger: Ledger, stage: str) -> None:
    """Several documents in a row, or one."""
    packs = ledger.is_on("sample_packing")
    if stage in ("cpt", "pretrain") and ledger.value("pretraining_dataset") and not packs:
        ledger.put("data.packing", "concatenate", "pretraining_dataset without sample_packing: texts end to end")
        ledger.otherwise("sample_packing", "data.packing: concatenate, as pretraining_dataset is read")
    elif packs and stage in ("cpt", "pretrain", "sft"):
        ledger.carry("sample_packing", "data.packing", "best_fit")
    else:
        ledger.put("data.packing", "none", "sample_packing")
        ledger.enter("sample_packing", "carried", "data.packing: none")
    if ledger.is_on("dataset_exact_deduplication"):
        ledger.carry("dataset_exact_deduplication", "data.deduplicate", "exact")
    ledger.otherwise(
        "streaming", "data.sources[].streaming, for datasets on the Hub" if ledger.is_on("streaming") else "off there"
    )


def write_embedding_rate(ledger: Ledger) -> None:
    """A rate of their own for embeddings and head."""
    rate, scale = ledger.number("embedding_lr"), ledger.number("embedding_lr_scale")
    ledger.skip_empty(["embedding_lr", "embedding_lr_scale"])
    if rate:
        ledger.carry("embedding_lr", "optimizer.embedding_learning_rate", rate)
    elif scale:
        ledger.put(
            "optimizer.embedding_learning_rate",
            scale * ledger.recipe["optimizer"]["learning_rate"],
            "embedding_lr_scale",
        )
        ledger.otherwise("embedding_lr_scale", "optimizer.embedding_learning_rate, multiplied out")
    ledger.otherwise("embedding_lr_scale", "embedding_lr decides")


def write_profile(ledger: Ledger) -> None:
    """The first steps under torch's profiler."""
    steps = ledger.whole("profiler_steps")
    ledger.skip_empty(["profiler_steps", "profiler_steps_start"])
    if steps:
        ledger.put(
            "monitoring.profile",
            {"at_step": (ledger.whole("profiler_steps_start") or 0) + 1, "steps": steps},
            "profiler_steps",
        )
    for key in ("profiler_steps", "profiler_steps_start"):
        ledger.otherwise(key, "monitoring.profile" if steps else "off there")


def write_recomputing(ledger: Ledger) -> None:
    """Whether activations are recomputed in the backward pass."""
    asked = ledger.value("gradient_checkpointing", False)
    offloads = {
        "gradient_checkpointing": asked in OFFLOADING,
        "activation_offloading": bool(ledger.value("activation_offloading")),
    }
    on = ledger.is_on("gradient_checkpointing") or asked in OFFLOADING
    write_checkpointing(ledger, on=on, offload=next((key for key, asks in offloads.items() if asks), ""))
    ledger.skip_empty(offloads)
    ledger.enter("gradient_checkpointing", "carried", "training.gradient_checkpointing")
    ledger.enter("activation_offloading", "carried", OFF)


def write_liger_kernels(ledger: Ledger) -> None:
    """Liger's kernels that are on."""
    on = [key for key in LIGER if ledger.is_on(key)]
    if on:
        write_liger(ledger, on, {LIGER[key]: True for key in on})
    for key in LIGER:
        ledger.skip_empty([key])
        ledger.enter(key, "carried", OFF)
