"""Write golden.json anew, after a change that is meant to change it: `python -m tests.promises.golden`; then read `git
diff`.

For tiny recipes of many kinds it holds the digests of the first 20 batches, the losses and gradient norms of 6 steps,
FLOPs a token and the plan's bytes at its peak.
"""

import hashlib
import json
import os
import tempfile
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import yaml

from cpt import (
    RunPlan,
    build_data,
    build_model,
    build_trainer,
    export_model,
    load_recipe,
    load_tokenizer,
    plan_run,
)

FILE = Path(__file__).with_name("golden.json")
TINY = Path(__file__).parents[2] / "recipes/tiny"
SHAPE = {"vocab_size": 260, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SHAPE |= {"num_key_value_heads": 2, "max_position_embeddings": 128}
DENSE = {**SHAPE, "intermediate_size": 48}
GPT2 = {"vocab_size": 260, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
EXPERTS = {
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
}
MODELS = {
    "llama": DENSE,
    "gpt2": {**GPT2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "minimind3": DENSE,
    "minimind2_moe": DENSE,
    "qwen2": DENSE,
    "nemotron": DENSE,
    "deepseek_v3": {
        **DENSE,
        "num_key_value_heads": 4,
        **LATENT,
        **EXPERTS,
        "first_k_dense_replace": 1,
    },
}
TEXTS, ANSWERS = {"path": f"{TINY}/data/texts.jsonl"}, {"path": f"{TINY}/data/answers.jsonl"}
PREFERENCES, JUDGED, QUESTIONS = (
    {"path": f"{TINY}/data/{name}.jsonl"} for name in ("preferences", "judged", "questions")
)
PHASES = [{"until": 1024, "weights": {"texts": 1}}, {"weights": {"texts": 1, "answers": 3}}]
SHORT = {**TEXTS, "name": "texts", "transforms": [{"name": "tests.promises.golden:first_words"}]}


def first_words(document: dict[str, Any]) -> dict[str, Any]:
    """A transform: documents of many lengths."""
    words = document["text"].split()
    return {**document, "text": " ".join(words[: 3 + len(document["text"]) % 40])}


def new(model: str, **data: Any) -> dict[str, Any]:
    """A model from scratch on texts."""
    model_section = {"from_scratch": True, "config": {"model_type": model, **MODELS[model]}}
    return {"stage": "pretrain", "model": model_section, "data": {"sources": [SHORT], **data}}


def stage(name: str, source: dict[str, Any], base: str, **more: Any) -> dict[str, Any]:
    """A stage that begins with a model."""
    return {"stage": name, "model": {"path": base}, "data": {"sources": [source]}, **more}


def recipes(base: str) -> dict[str, dict[str, Any]]:
    """What is measured, by name; `base` is a model's folder."""
    chats = {"path": ANSWERS["path"], "name": "answers", "chat": "messages"}
    one, eight = {"per_device_train_batch_size": 1}, {"per_device_train_batch_size": 8}
    sampling = {**eight, "num_generations": 4, "max_completion_length": 2}
    reward = [{"name": "format", "pattern": "[a-p].*"}]
    teacher = {"teacher_model_name_or_path": base}
    return {
        **{f"pretrain-{model}": new(model) for model in MODELS},
        "packing-concatenate": new("llama", packing="concatenate"),
        "packing-sliding-window": new(
            "llama", packing="sliding_window", stride=16, sequence_length=32
        ),
        "packing-none": new("llama", packing="none"),
        "packing-token-budget": {**new("llama", packing="token_budget"), "training": one},
        "phases": new("llama", sources=[{**SHORT}, chats], phases=PHASES),
        "cpt": stage("cpt", SHORT, base),
        "lora": {**stage("cpt", SHORT, base), "model": {"path": base, "lora": {"r": 4}}},
        "sft": stage("sft", ANSWERS, base),
        "dpo": stage("dpo", PREFERENCES, base),
        "kto": stage("kto", JUDGED, base),
        "reward": stage("reward", PREFERENCES, base),
        "grpo": stage(
            "grpo",
            QUESTIONS,
            base,
            rewards=reward,
            training=sampling,
            budget={"tokens": 8 * 64 * 6},
        ),
        "distill": {
            **new("llama", sources=[ANSWERS]),
            "stage": "distill",
            "training": teacher,
            "seed": 7,
        },
    }


NAMES = tuple(recipes(""))


def measure(name: str, folder: Path) -> dict[str, Any]:
    """What the file holds of one recipe; runs and models go to the folder."""
    base = folder / "base"
    if not base.exists():
        recipe, tokenizer, trainer = build({**new("llama"), "name": "made-base"}, folder)
        export_model(trainer, recipe, tokenizer, base)
    recipe, _, trainer = build({"name": name, **recipes(str(base))[name]}, folder)
    digests = [digest(batch) for batch in islice(trainer.get_train_dataloader(), 20)]
    torch.manual_seed(0)
    trainer.train()
    logged = map(json.loads, (folder / "runs" / name / "metrics.jsonl").read_text().splitlines())
    steps = [row for row in logged if "loss" in row][:6]
    plans = {gpu: plan_run(recipe, gpu) for gpu in ("cpu", "RTX 4090")}
    return {
        "batches": digests,
        "losses": [float(f"{row['loss']:.6g}") for row in steps],
        "gradient_norms": [float(f"{row['grad_norm']:.6g}") for row in steps],
        "flops_per_token": plans["cpu"].flops_per_token,
        "plan": {gpu: peak(plan) for gpu, plan in plans.items()},
    }


def peak(plan: RunPlan) -> dict[str, float]:
    """The terms of the moment that takes most memory."""
    terms = max(plan.gpu_terms.values(), key=lambda terms: sum(terms.values()))
    return {name: round(size) for name, size in terms.items()}


def build(sections: dict[str, Any], folder: Path) -> tuple[Any, Any, Any]:
    """Recipe, tokenizer and trainer."""
    training = {
        "per_device_train_batch_size": 2,
        "logging_steps": 1,
        "use_cpu": True,
        **sections.get("training", {}),
    }
    recipe = {
        "output_dir": str(folder / "runs"),
        "tokenizer": {"path": str(TINY / "tokenizer")},
        "budget": {"tokens": 2560, "global_batch_tokens": 256},
        "optimizer": {"learning_rate": 3e-3},
        **sections,
        "data": {"sequence_length": 64, **sections["data"]},
        "training": training,
    }
    (folder / f"{sections['name']}.yaml").write_text(yaml.safe_dump(recipe))
    loaded = load_recipe(folder / f"{sections['name']}.yaml")
    tokenizer = load_tokenizer(loaded)
    data, model = build_data(loaded, tokenizer), build_model(loaded, tokenizer)
    return loaded, tokenizer, build_trainer(loaded, model, tokenizer, data)


def digest(batch: Any) -> str:
    """Of all that is in a batch."""
    return hashlib.sha256(json.dumps(plain(batch), sort_keys=True).encode()).hexdigest()[:16]


def plain(value: Any) -> Any:
    """Tensors as lists, in whatever holds them."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if hasattr(value, "items"):
        return {key: plain(inner) for key, inner in value.items()}
    return [plain(inner) for inner in value] if isinstance(value, list | tuple) else value


def main() -> None:
    """Measure all and write the file."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["CPT_CACHE"] = f"{folder}/store"
        golden = {name: measure(name, Path(folder)) for name in NAMES}
    texts = []
    for name, known in golden.items():
        lines = ",\n".join(
            f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in known.items()
        )
        texts.append(f"{json.dumps(name)}: {{\n{lines}\n}}")
    FILE.write_text("{\n" + ",\n".join(texts) + "\n}\n")


if __name__ == "__main__":
    main()
