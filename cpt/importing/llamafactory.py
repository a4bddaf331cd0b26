"""From a LLaMA-Factory config to a recipe."""

from typing import Any

from cpt.importing.conflicts import resolve_conflicts
from cpt.importing.dialect import LLAMAFACTORY
from cpt.importing.engines import write_engines
from cpt.importing.learning import write_optimizer, write_schedule
from cpt.importing.ledger import OFF, Ledger, truth
from cpt.importing.lengths import write_lengths
from cpt.importing.llamafactory_data import write_sources
from cpt.importing.llamafactory_keys import HANDLED, IDLE, KNOWN, NOT, PASSED
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
from cpt.importing.passing import pass_on
from cpt.importing.rest import enter_the_rest
from cpt.importing.tokens import write_template
from cpt.importing.watching import write_evaluation, write_name, write_saving, write_tracking
from cpt.recipe.huggingface_keys import keys_of_config
from cpt.recipe.moved_keys import MOVED, NO_EFFECT, REMOVED

STAGES = {"pt": "cpt", "sft": "sft", "rm": "reward", "ppo": "ppo", "dpo": "dpo", "kto": "kto"}
LOSSES = {"orpo": ("orpo", None), "simpo": ("cpo", "simpo")}
"""Losses of preferences that are stages here, with their `loss_type`."""
LORA = {
    "lora_rank": "r",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "lora_target": "target_modules",
    "additional_target": "modules_to_save",
    "use_rslora": "use_rslora",
    "use_dora": "use_dora",
}
OFT = {
    "oft_rank": "r",
    "oft_block_size": "oft_block_size",
    "oft_target": "target_modules",
    "module_dropout": "module_dropout",
}
"""Key -> option of peft."""
OURS = {
    "lr",
    "block_size",
    "batch_size",
    "max_seq_length",
    "packing",
    "eval_packing",
    "packing_strategy",
    "max_length",
}
"""Of the keys that are written elsewhere here, those that the Trainer never had."""
START = ["pissa_init", "pissa_iter"]
QUANTIZED = ["quantization_bit", "quantization_type", "double_quantization", "quantization_method"]
WITH_REFERENCE = ("dpo", "kto", "ppo")
PREFERENCES = ("dpo", "orpo", "cpo")


def import_llamafactory(ledger: Ledger) -> None:
    """Fill the ledger's recipe; the order of the sections is that of this function."""
    write_name(ledger)
    stage = write_stage(ledger)
    if ledger.value("seed") is not None:
        ledger.carry("seed", "seed", int(ledger.number("seed") or 0))
    write_model(ledger)
    ledger.put("data.sequence_length", None)
    write_packing(ledger, stage)
    write_sources(ledger, stage)
    lengths = write_lengths(ledger, LLAMAFACTORY)
    write_optimizer(ledger, LLAMAFACTORY)
    write_schedule(ledger, LLAMAFACTORY, lengths)
    write_saving(ledger, LLAMAFACTORY, lengths)
    write_evaluation(ledger, LLAMAFACTORY, lengths)
    write_tracking(ledger)
    write_precision(ledger)
    write_recomputing(ledger)
    asked = [key for key in ("enable_liger_kernel", "use_liger_kernel") if ledger.is_on(key)]
    if asked:
        write_liger(ledger, asked, {})
    write_engines(ledger)
    resolve_conflicts(ledger)
    write_preferences(ledger, stage)
    write_template(ledger, "template", stage, own=())
    trainers = trainer_keys()
    enter_the_rest(
        ledger, handled=HANDLED, passed=PASSED, idle=IDLE, dropped=NOT, known=KNOWN | trainers, trainers=trainers
    )


def trainer_keys() -> set[str]:
    """The keys of Hugging Face's Trainer, of now and of earlier, which a config may hold besides."""
    return {*keys_of_config("transformers:Seq2SeqTrainingArguments"), *(MOVED.keys() - OURS), *NO_EFFECT, *REMOVED}


def write_stage(ledger: Ledger) -> str:
    """`stage`, of which some losses of preferences are one."""
    asked, loss = str(ledger.value("stage", "sft")).lower(), str(ledger.value("pref_loss", "sigmoid")).lower()
    stage = STAGES.get(asked, "sft")
    if stage == "dpo" and loss in LOSSES:
        stage = LOSSES[loss][0]
    if truth(ledger.value("train_from_scratch")):
        stage = "pretrain" if stage == "cpt" else stage
    is_whole = stage == "sft" and ledger.is_on("train_on_prompt")
    if is_whole:
        stage = "cpt"
        ledger.otherwise("train_on_prompt", "stage: cpt with `chat`, which learns every token of a conversation")
    ledger.put("stage", stage, "" if asked == stage else f"stage: {asked}")
    ledger.skip_empty(["stage", "train_on_prompt", "do_train"])
    if asked not in STAGES:
        ledger.drop(
            "stage",
            f"there is no stage for `{asked}`; the recipe says `{stage}`. docs/stages.md names those there are",
        )
    ledger.enter("stage", "carried", f"stage: {stage}")
    told = OFF if not ledger.is_on("train_on_prompt") else f"stage `{stage}` learns what it learns"
    ledger.enter("train_on_prompt", "carried" if not ledger.is_on("train_on_prompt") else "not", told)
    told = "cpt train" if ledger.is_on("do_train") else "this recipe trains; `cpt evaluate` judges a model"
    ledger.enter("do_train", "carried" if ledger.is_on("do_train") else "not", told)
    return "sft" if is_whole else stage


def write_model(ledger: Ledger) -> None:
    """Base, attention and adapter."""
    ledger.carry("model_name_or_path", "model.path")
    revision = ledger.value("model_revision")
    if revision and revision != "main":
        ledger.carry("model_revision", "model.revision", str(revision))
    ledger.enter("model_revision", "carried", "main, as here")
    write_trust(ledger)
    for key, ours in {"train_from_scratch": "model.from_scratch", "resize_vocab": "model.resize_embeddings"}.items():
        if ledger.is_on(key):
            ledger.carry(key, ours, True)
    if ledger.value("rope_scaling"):
        kind = ledger.value("rope_scaling")
        told = (
            f"its factor follows from the model's own length there: write `model.rope: {{type: {kind}, factor: ...}}`"
        )
        ledger.drop("rope_scaling", told)
    if ledger.value("flash_attn"):
        write_attention(ledger, "flash_attn", str(ledger.value("flash_attn")))
    write_tuning(ledger)


def write_tuning(ledger: Ledger) -> None:
    """Adapters, or all parameters."""
    asked = str(ledger.value("finetuning_type", "lora")).lower()
    ledger.skip_empty(["finetuning_type", *LORA, *OFT, *START, *QUANTIZED])
    keys = [*LORA, *OFT, *START, *QUANTIZED]
    if asked in ("lora", "oft"):
        if not starts_from_weights(ledger, keys, "finetuning_type"):
            return
        write_lora(ledger, LORA if asked == "lora" else OFT, asked)
        ledger.enter("finetuning_type", "carried", "model.lora" if asked == "lora" else "model.lora, with method: oft")
        without_adapter(ledger, list(OFT if asked == "lora" else [*LORA, *START]))
        return
    if asked == "full":
        ledger.enter("finetuning_type", "carried", "all parameters: no `model.lora`")
    what = (
        "trains some layers alone"
        if asked == "freeze"
        else "is nothing that LLaMA-Factory knows (QLoRA is lora with quantization_bit)"
    )
    ledger.drop("finetuning_type", f"`{asked}` {what}, and the recipe trains all: write `model.lora` for adapters")
    without_adapter(ledger, keys)


def write_lora(ledger: Ledger, names: dict[str, str], method: str) -> None:
    """`model.lora`, whose rank and targets are written also where the config leaves them to the tool."""
    used = {key: option for key, option in names.items() if ledger.value(key) not in (None, "", [], False)}
    options: dict[str, Any] = {} if method == "lora" else {"method": method}
    options |= {option: ledger.value(key) for key, option in used.items()}
    for option in {"target_modules", "modules_to_save"} & options.keys():
        options[option] = targets(options[option])
    write_adapter(ledger, options, used)
    if method == "lora":
        rank = options.setdefault("r", 8)
        options.setdefault("lora_alpha", 2 * rank)
        options.setdefault("target_modules", "all-linear")
        if ledger.is_on("pissa_init") and (quantization(ledger, method) or ledger.recipe["stage"] in WITH_REFERENCE):
            for key in START:
                ledger.drop(
                    key,
                    "PiSSA changes the base's weights: not for a 4-bit base, or for a stage whose reference is the"
                    " base",
                )
        elif ledger.is_on("pissa_init"):
            rounds = int(ledger.number("pissa_iter", 16) or 16)
            options["init_lora_weights"] = "pissa" if rounds < 0 else f"pissa_niter_{rounds}"
            for key in START:
                ledger.enter(key, "carried", "model.lora.init_lora_weights")
    options |= quantization(ledger, method)
    for key in [*names, *START]:
        ledger.enter(key, "carried", OFF)


def quantization(ledger: Ledger, adapter: str) -> dict[str, Any]:
    """The base in 4 bit, where asked and where the adapter has layers for it."""
    bits, method = ledger.whole("quantization_bit"), str(ledger.value("quantization_method", "bitsandbytes")).lower()
    kind = str(ledger.value("quantization_type", "nf4"))
    if bits is None:
        for key in QUANTIZED:
            ledger.otherwise(key, "no effect there: nothing is quantised")
        return {}
    if adapter == "oft" or bits != 4 or method not in ("bitsandbytes", "bnb"):
        told = "peft's oft has no layer for weights in 4 bit: the base stays whole" if adapter == "oft" else None
        told = told or f"{bits} bit by {method}: the base is in 4 bit by bitsandbytes (`quantize: nf4`), or whole"
        ledger.drop("quantization_bit", told)
        for key in QUANTIZED:
            ledger.otherwise(key, "see quantization_bit")
        return {}
    for key in QUANTIZED:
        ledger.enter(key, "carried", "model.lora.quantize and .double_quantize")
    doubled = truth(ledger.value("double_quantization", True))
    return {"quantize": kind if kind in ("nf4", "fp4") else "nf4", "double_quantize": doubled}


def write_packing(ledger: Ledger, stage: str) -> None:
    """Several documents in a row, or one; texts of pre-training are always put end to end there."""
    ledger.skip_empty(["packing", "neat_packing"])
    neat, asked = ledger.is_on("neat_packing"), ledger.value("packing")
    if neat:
        ledger.put("data.packing", "best_fit", "neat_packing")
        ledger.enter("neat_packing", "carried", "data.packing: best_fit")
        ledger.otherwise("packing", "neat_packing decides")
    elif stage in ("cpt", "pretrain") and asked in (None, True):
        ledger.put("data.packing", "concatenate", "texts end to end, as LLaMA-Factory has them")
        ledger.otherwise("packing", "data.packing: concatenate; documents in a row do not see each other here")
    elif truth(asked):
        ledger.put("data.packing", "best_fit", "packing")
        ledger.otherwise("packing", "data.packing: best_fit; examples in a row do not see each other here")
    else:
        ledger.put("data.packing", "none", "packing" if asked is not None else f"the default of {ledger.called}")
        ledger.enter("packing", "carried", "data.packing: none")
    ledger.enter("neat_packing", "carried", OFF)


def write_recomputing(ledger: Ledger) -> None:
    """On unless it is disabled."""
    off = ledger.is_on("disable_gradient_checkpointing") or ledger.value("gradient_checkpointing") is False
    asked = any(ledger.value(key) is not None for key in ("disable_gradient_checkpointing", "gradient_checkpointing"))
    offload = "use_unsloth_gc" if ledger.is_on("use_unsloth_gc") and not off else ""
    write_checkpointing(
        ledger, on=not off, comment="" if asked else f"the default of {ledger.called}", offload=offload
    )
    if ledger.value("use_reentrant_gc") is not None and not off:
        options = ledger.recipe["training"].get("gradient_checkpointing_kwargs", {})
        told = ", ".join(filter(None, [offload, "use_reentrant_gc"]))
        ledger.put(
            "training.gradient_checkpointing_kwargs",
            options | {"use_reentrant": ledger.is_on("use_reentrant_gc")},
            told,
        )
        ledger.enter("use_reentrant_gc", "carried", "training.gradient_checkpointing_kwargs")
    for key in ("disable_gradient_checkpointing", "gradient_checkpointing"):
        ledger.skip_empty([key])
        ledger.enter(key, "carried", f"training.gradient_checkpointing: {'false' if off else 'true'}")
    ledger.otherwise("use_reentrant_gc", "nothing is recomputed")


def write_preferences(ledger: Ledger, stage: str) -> None:
    """Loss and strength of preferences, and where PPO's rewards come from."""
    loss = str(ledger.value("pref_loss", "sigmoid")).lower()
    ledger.skip_empty(["pref_loss", "pref_beta", "reward_model"])
    if stage == "cpo":
        ledger.put("training.loss_type", LOSSES["simpo"][1], "pref_loss: simpo")
    elif stage == "dpo" and loss != "kto_pair":
        ledger.put("training.loss_type", [loss], "pref_loss")
    if stage == "dpo" and loss == "kto_pair":
        ledger.drop(
            "pref_loss",
            "TRL has no `kto_pair` any more: `stage: kto` learns from single judgements; the recipe takes sigmoid",
        )
    told = f"stage: {stage}" + (", with training.loss_type" if stage in ("dpo", "cpo") else "")
    ledger.enter(
        "pref_loss",
        "carried" if stage in PREFERENCES else "otherwise",
        told if stage in PREFERENCES else "of preferences",
    )
    if stage in (*PREFERENCES, "kto"):
        pass_on(ledger, "pref_beta", "beta")
    ledger.otherwise("pref_beta", "of preferences")
    if stage == "ppo":
        path = ledger.value("reward_model")
        ledger.put(
            "rewards",
            [{"name": "reward_model", "path": str(path)}] if path else ["exact_match"],
            "" if path else "FILL IN",
        )
        ledger.enter("reward_model", "carried", "rewards: reward_model")
    ledger.otherwise("reward_model", "of PPO")
