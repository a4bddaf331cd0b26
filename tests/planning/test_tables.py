"""All that the planner says of some runs, as approved: bytes and notes of each term, seconds, and changes that fit.

Other tests say that these numbers are right; this one, that none of them changes unseen.
"""

from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest
from approved import check_approved
from planned_setups import PLAIN, WAYS

from benchmarks.plan.dry_run import bytes_of_one_process
from cpt.hardware import GPU_TYPES
from cpt.models.config import config_from
from cpt.models.layers import Recomputing
from cpt.planning.activations import ActivationCounts, Activations, count_activations
from cpt.planning.fitting import with_adapters, with_all_parameters, with_small_states
from cpt.planning.memory import plan_memory
from cpt.planning.memory_parts import checkpoint_bytes, update_traffic
from cpt.planning.model_sizes import (
    KL,
    PAIRS,
    SCORE,
    TAUGHT,
    TAUGHT_IN_TILES,
    TAUGHT_WHOLE,
    TILES,
    ModelSizes,
    StageNeeds,
    sizes_of_model,
    with_own_head,
)
from cpt.planning.speed import find_target, planned_speed
from cpt.planning.workload import Setup, Sharding

HERE = Path(__file__).parent
# 1,003 numbers, no two sizes of which are the same
MODEL = ModelSizes(
    name="llama",
    parameters=1003,
    trained=1003,
    head=106,
    vocabulary=53,
    hidden=2,
    largest_matrix=111,
    largest_layer=307,
    embedding=97,
    is_tied=False,
    flops_per_token=6007,
    has_fused_loss=True,
    in_linear_layers=701,
    largest_in_layers=61,
    cached=13,
)
TIED = replace(MODEL, is_tied=True, head=97, parameters=897, trained=897)
LARGE = replace(
    MODEL,
    parameters=8_030_000_003,
    trained=8_030_000_003,
    head=525_336_576,
    embedding=525_336_577,
    vocabulary=128_256,
    hidden=4096,
    largest_matrix=525_336_577,
    largest_layer=218_112_001,
    largest_in_layers=58_720_256,
    in_linear_layers=6_979_321_856,
    flops_per_token=4.5e10,
    cached=65_536,
)
ROW = Activations(
    kept=10_007,
    layer_inputs=503,
    backward=307,
    again=2_309,
    forward=641,
    layers=7,
    attention=211,
)
COUNTS = ActivationCounts(
    ROW, replace(ROW, kept=20_011, layer_inputs=1_009, backward=601, again=4_603, forward=1277)
)
COMPILED = ActivationCounts(
    replace(ROW, layer_gradients=331), replace(COUNTS.two_rows, layer_gradients=331)
)
BASE = replace(PLAIN, sequence_length=31, micro_batch=3)
AUTOCAST = {"weights_bytes": 4}
CPU = {"weights_bytes": 4, "half": False, "on_cpu": True}
BUCKETS = {"reduce_bucket_size": 401, "allgather_bucket_size": 203, "prefetch_bucket_size": 101}
LIVE = {"max_live_parameters": 503, "max_reuse_distance": 7, "sub_group_size": 97}
ON_HOST = {"offload_optimizer": True, "offload_parameters": True}
FSDP = Sharding(3, is_fsdp=True)
TEACHER = replace(
    MODEL, parameters=5003, largest_layer=701, largest_matrix=509, hidden=6, weights_bytes=2
)
JUDGE = replace(MODEL, parameters=401)


def needs(stage: str, logits: str, **options) -> dict:
    return {"needs": StageNeeds(stage, logits, **options)}


RUNS = WAYS | {
    "DDP": {"gpus": 6, "nodes": 2, "optimizer": "sgd"},
    "DDP, accumulating": {"gpus": 5, "accumulation": 3},
    "DDP of adapters": {"gpus": 3, "accumulation": 5, "lora": {"r": 3}, **AUTOCAST},
    "8 bit, accumulating": {"optimizer": "adamw_8bit", "accumulation": 3},
    "adapters beside 8 bit": {"lora": {"r": 3, "quantize": "int8"}},
    "paged": {"gpus": 3, "optimizer": "paged_adamw_8bit", "rounding": "stochastic"},
    "paged, released": {"optimizer": "paged_adamw_8bit", "releases": True},
    "compiled": {"compiles": True},
    "compiled, released": {"compiles": True, "releases": True, "checkpointing": True},
    "every third layer, offloaded": {
        "checkpointing": True,
        "recomputing": Recomputing(
            checkpoints=True, every_n_layers=3, selective=True, offload=True
        ),
    },
    "autocast, recomputed": {**AUTOCAST, "checkpointing": True, "tf32": True},
    "ZeRO-1": {"gpus": 5, "zero": Sharding(1, **BUCKETS, overlap_comm=False)},
    "ZeRO-2": {
        "gpus": 5,
        "accumulation": 3,
        "zero": Sharding(2, **BUCKETS, accumulates_in_fp32=True),
    },
    "ZeRO-2, offloaded": {
        "gpus": 6,
        "nodes": 2,
        "accumulation": 3,
        "zero": Sharding(2, **BUCKETS, offload_optimizer=True),
    },
    "ZeRO-2, offloaded, fp32 gradients": {
        "gpus": 2,
        "zero": Sharding(2, **BUCKETS, offload_optimizer=True, accumulates_in_fp32=True),
    },
    "ZeRO-3": {"gpus": 6, "nodes": 3, "zero": Sharding(3, **BUCKETS, **LIVE)},
    "ZeRO-3, released at once": {
        "gpus": 6,
        "checkpointing": True,
        "zero": Sharding(3, **BUCKETS, **LIVE | {"max_reuse_distance": 0}),
        "lora": {"r": 3},
    },
    "ZeRO-3, offloaded": {
        "gpus": 6,
        "nodes": 2,
        "checkpointing": True,
        "zero": Sharding(3, **BUCKETS, **LIVE, **ON_HOST, accumulates_in_fp32=True),
        **needs("dpo", TILES, reference=True, sequences=2),
    },
    "FSDP2": {"gpus": 5, "accumulation": 3, "zero": FSDP, **AUTOCAST},
    "FSDP2, gathered": {
        "gpus": 5,
        "accumulation": 3,
        "zero": replace(FSDP, keeps_gathered=True, reduces_each_micro_batch=True),
        "lora": {"r": 3, "init_lora_weights": "pissa"},
    },
    "dpo": {"gpus": 2, **needs("dpo", TILES, reference=True, sequences=2, forward_passes=1.0)},
    "dpo on the CPU": {**CPU, **needs("dpo", TILES, reference=True, sequences=2)},
    "orpo": needs("orpo", PAIRS, sequences=2),
    "orpo in fp32": {**CPU, **needs("orpo", PAIRS, sequences=2)},
    "reward": needs("reward", SCORE, sequences=2),
    "near the base": {**AUTOCAST, **needs("cpt", KL, reference=True, forward_passes=2)},
    "ppo": {
        "accumulation": 5,
        **AUTOCAST,
        **needs("ppo", TILES, completion=7, reward_models=(JUDGE, replace(JUDGE, weights_bytes=2))),
    },
    "grpo": {
        "gpus": 2,
        "accumulation": 6,
        "zero": Sharding(3, **BUCKETS, **LIVE),
        **needs("grpo", TILES, completion=7, steps_per_generation=2, reward_models=(JUDGE,)),
    },
    "grpo on the CPU": {**CPU, **needs("grpo", TILES, completion=7, generation_batch=11)},
    "distill": needs("distill", TAUGHT, teacher=TEACHER),
    "distill in fp32": {**CPU, **needs("distill", TAUGHT, teacher=TEACHER)},
    "distill, offloaded": {
        "gpus": 6,
        "nodes": 3,
        "zero": Sharding(3, **BUCKETS, **LIVE, **ON_HOST),
        **needs("distill", TAUGHT, teacher=TEACHER),
    },
    "distill on policy": {**CPU, **needs("d", TAUGHT_IN_TILES, teacher=TEACHER, completion=7)},
    "gkd": needs("gkd", TAUGHT_WHOLE, teacher=TEACHER, completion=7, keeps_cache=False),
    "only the head": {"fused_loss": True},
}
LARGE_RUNS = {
    "fused": {"fused_loss": True},
    "fused, autocast": {"fused_loss": True, "checkpointing": True, **AUTOCAST},
    "in tiles": needs("dpo", TILES, sequences=2),
    "in tiles on the CPU": {**CPU, **needs("dpo", TILES, sequences=2)},
    "taught": needs("distill", TAUGHT, teacher=replace(LARGE, weights_bytes=2)),
    "DDP of 8, accumulating": {"gpus": 8, "accumulation": 3},
    "two machines": {"gpus": 16, "nodes": 2, "accumulation": 3, "checkpointing": True},
    "ZeRO-1 of 8": {"gpus": 8, "zero": Sharding(1)},
    "ZeRO-2 on one": {"zero": Sharding(2, offload_optimizer=True)},
    "ZeRO-3, to the host": {
        "zero": Sharding(3, **ON_HOST),
        "accumulation": 3,
        "checkpointing": True,
    },
    "FSDP2 of 8": {"gpus": 8, "zero": FSDP, **AUTOCAST, "accumulation": 3},
    "paged": {"optimizer": "paged_adamw_8bit", "fused_loss": True},
    "paged, released": {"optimizer": "paged_adamw_8bit", "releases": True, "fused_loss": True},
    "8 bit, stochastic": {"optimizer": "adamw_8bit", "rounding": "stochastic", "fused_loss": True},
    "paged, 32 bit": {"optimizer": "paged_adamw_32bit", "fused_loss": True},
    "three moments in 8 bit": {"optimizer": "ademamix_8bit", "fused_loss": True},
}


def written(size: float) -> str:
    return f"{size:,.3f}".rstrip("0").rstrip(".")


def values_of(record: object) -> str:
    values = {one.name: getattr(record, one.name) for one in fields(record)}
    return ", ".join(
        f"{name} {written(value) if isinstance(value, float) else value}"
        for name, value in values.items()
    )


def plan_of(name: str, model: ModelSizes, setup: Setup) -> list[str]:
    counts = COMPILED if setup.compiles else COUNTS
    plan = plan_memory(
        model, setup, counts, workers=2 if setup.accumulation > 1 else 0, snapshot=setup.gpus > 1
    )
    terms = {
        f"{term.name} {written(term.size)}{f' ({term.note})' if term.note else ''}": None
        for moment in plan.moments
        for term in moment.terms
        if term.note != "3% of the above"  # in the sums
    }
    target = find_target("RTX 4090" if setup.gpus == 3 else "H100", setup.gpus, 64.0)
    speed = planned_speed(model, setup, target, 0.4)
    return [
        f"== {name}",
        "; ".join(f"{moment.name} {written(moment.size)}" for moment in plan.moments),
        "; ".join(terms),
        "host: "
        + "; ".join(
            f"{term.name} {written(term.size)}{f' ({term.note})' if term.note else ''}"
            for term in plan.host.terms
        ),
        f"peak: {plan.peak.name}; alone {written(bytes_of_one_process(model, setup, counts))}",
        f"saved {written(checkpoint_bytes(model, setup))}; updated {written(update_traffic(setup))}",
        f"{speed.tokens_per_second:.6g} tokens/s of {speed.source}. {speed.waits}".strip(),
        "",
    ]


def test_plans_are_as_approved():
    lines = [values_of(find_target(kind.name, 3, 64.0)) for kind in GPU_TYPES]
    lines += [
        values_of(find_target("mine", 3, 64.0, memory=7, peak_tflops=11, network_gbit=20)),
        "",
    ]
    for name, changes in RUNS.items():
        model = MODEL if changes.get("lora") is None else replace(MODEL, trained=71)
        if name == "only the head":
            model = replace(MODEL, trained=MODEL.head, trains_embedding=False)
        setup = replace(BASE, **changes)
        lines += plan_of(name, with_own_head(model, setup.needs, adapters=False), setup)
    for name in (
        "half",
        "accumulation",
        "fused loss",
        "ZeRO-2",
        "autocast, recomputed",
        "paged, released",
    ):
        lines += plan_of(f"{name}, tied", TIED, replace(BASE, **RUNS[name]))
    frozen = replace(MODEL, trained=500, trains_head=False, trains_embedding=False)
    lines += plan_of(
        "a frozen head", frozen, replace(BASE, fused_loss=True, **AUTOCAST, checkpointing=True)
    )
    lines += plan_of(
        "no fused loss", replace(MODEL, has_fused_loss=False), replace(BASE, fused_loss=True)
    )
    for name, changes in LARGE_RUNS.items():
        setup = replace(PLAIN, sequence_length=4099, micro_batch=3, **changes)
        lines += plan_of(f"large, {name}", LARGE, setup)
    check_approved("\n".join(lines), HERE / "approved_plans.txt")


# --- sizes and activations, counted on models of a few thousand weights ---

SHAPE = {
    "model_type": "llama",
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "vocab_size": 301,
}
LATENT = {
    "model_type": "deepseek_v3",
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 4,
    "v_head_dim": 12,
    "num_key_value_heads": 6,
    "n_routed_experts": 5,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 20,
    "first_k_dense_replace": 1,
}
FAMILIES = {
    "llama": SHAPE,
    "qwen3, tied": SHAPE | {"model_type": "qwen3", "head_dim": 10, "tie_word_embeddings": True},
    "deepseek_v3": SHAPE | LATENT,
    "mixtral": SHAPE | {"model_type": "mixtral", "num_local_experts": 5, "num_experts_per_tok": 2},
}
JETMOE = {"vocab_size": 301, "hidden_size": 48, "num_hidden_layers": 3, "kv_channels": 16}
COUNTED = {
    "half": (SHAPE, {}),
    "fp32": (SHAPE, {"weights_bytes": 4, "half": False, "packed": False}),
    "autocast": (SHAPE, {"weights_bytes": 4}),
    "4 bit": (SHAPE, {"lora": {"r": 3, "quantize": "nf4"}, "packed": False}),
    "8 bit": (SHAPE, {"lora": {"r": 3, "quantize": "int8"}}),
    "only the last layer": (SHAPE, {"train_only": ["layers.2", "lm_head"]}),
    "compiled": (SHAPE, {"compiles": True, "packed": False}),
    "compiled, selective": (
        SHAPE,
        {
            "compiles": True,
            "packed": False,
            "checkpointing": True,
            "recomputing": Recomputing(checkpoints=True, selective=True),
        },
    ),
    "experts": (FAMILIES["mixtral"], {"compiles": True}),
    "estimated": (JETMOE | {"model_type": "jetmoe"}, {}),
    "estimated, fp32": (JETMOE | {"model_type": "jetmoe"}, {"weights_bytes": 4, "half": False}),
    "with completions": (FAMILIES["qwen3, tied"], needs("grpo", TILES, completion=3, sequences=2)),
}


@pytest.mark.heavy
def test_sizes_and_activations_are_as_approved():
    lines = []
    for name, shape in FAMILIES.items():
        for what, (lora, parts) in {
            "": (None, None),
            ", adapters": ({"r": 3, "target_modules": ["q_proj", "up_proj"]}, None),
            ", parts": (None, ["lm_head", "layers.1"]),
        }.items():
            if what and name != "llama":
                continue
            sizes = sizes_of_model(config_from(shape), lora, 37, parts)
            lines += [f"== sizes: {name}{what}", values_of(sizes), ""]
    for name, (shape, changes) in COUNTED.items():
        setup = replace(PLAIN, sequence_length=37, **changes)
        counts = count_activations(config_from(shape), setup)
        lines += [
            f"== activations: {name}",
            values_of(counts.one_row),
            values_of(counts.two_rows),
            "",
        ]
    check_approved("\n".join(lines), HERE / "approved_sizes.txt")


# --- what is tried where a recipe does not fit ---

TRIED = {
    "one GPU": (BASE, "RTX 4090"),
    "one GPU, six rows": (replace(BASE, micro_batch=6, accumulation=5, compiles=True), "RTX 4090"),
    "four GPUs": (
        replace(BASE, gpus=4, batch_is_given=True, compiles=True, half=False, weights_bytes=4),
        "H100",
    ),
    "four GPUs, sharded": (replace(BASE, gpus=4, zero=FSDP, accumulation=2), "H100"),
    "offloaded": (replace(BASE, zero=Sharding(3, **ON_HOST), fused_loss=True), "RTX 4090"),
    "fp16": (replace(BASE, gpus=2, scales_loss=True), "RTX 4090"),
    "8 bit": (
        replace(BASE, optimizer="adamw_8bit", micro_batch=2, batch_is_given=True),
        "RTX 4090",
    ),
    "sgd": (replace(BASE, gpus=2, optimizer="sgd"), "RTX 4090"),
    "adapters": (replace(BASE, lora={"r": 3}, checkpointing=True), "RTX 4090"),
    "from scratch": (replace(BASE, from_scratch=True, checkpointing=True), "RTX 4090"),
    "parts": (replace(BASE, train_only="lm_head", checkpointing=True), "RTX 4090"),
    "released": (replace(BASE, releases=True, gpus=2), "RTX 4090"),
    "grpo": (
        replace(
            BASE,
            micro_batch=4,
            accumulation=2,
            **needs("grpo", TILES, completion=7, steps_per_generation=3),
        ),
        "RTX 4090",
    ),
    "on the CPU": (replace(BASE, micro_batch=2, accumulation=3, **CPU), "cpu"),
}


def test_changes_that_are_tried_are_as_approved(monkeypatch):
    monkeypatch.setattr("cpt.planning.fitting.CHECKPOINTS_AROUND_CALLS", True)
    lines = []
    for name, (setup, gpu) in TRIED.items():
        target = find_target(gpu, setup.gpus, 64.0)
        lines += [f"== {name}"]
        for kind in (with_all_parameters, with_small_states, with_adapters):
            lines.append(f"{kind.__name__}:")
            for changed, changes in kind(setup, target):
                before = asdict(setup)
                becomes = {
                    key: value
                    for key, value in asdict(changed).items()
                    if value != before[key] and key not in ("zero", "needs")
                }
                engine = ""
                if changed.zero != setup.zero:
                    engine = "no engine" if changed.zero is None else f"stage {changed.zero.stage}"
                steps = changed.needs.steps_per_generation
                lines.append(f"{changes} -> {becomes} {engine} {steps or ''}".strip())
        lines.append("")
    check_approved("\n".join(lines), HERE / "approved_changes.txt")
