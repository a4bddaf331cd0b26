"""The planner: what it counts is what a step takes, and what it proposes fits."""

import json
import re
from pathlib import Path

import pytest
import yaml

from benchmarks.plan.dry_run import dry_run, planned_bytes
from cpt import load_recipe, plan_run, resolve_recipe
from cpt.errors import ResourceError
from cpt.planning.plan import plan_recipe
from cpt.planning.speed import find_target

GIB = 2**30
LLAMA = {"model_type": "llama", "hidden_size": 512, "intermediate_size": 1408}
LLAMA |= {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4}
QWEN3 = {
    "model_type": "qwen3",
    "num_key_value_heads": 2,
    "head_dim": 64,
    "tie_word_embeddings": True,
}
FAMILIES = {
    "llama": {**LLAMA, "vocab_size": 16000},
    "qwen3": {**LLAMA, **QWEN3, "vocab_size": 50000},
    "nemotron": {**LLAMA, "model_type": "nemotron", "vocab_size": 32000, "hidden_act": "relu2"},
    "gpt2": {
        "model_type": "gpt2",
        "n_embd": 384,
        "n_layer": 6,
        "n_head": 6,
        "vocab_size": 16000,
        "n_positions": 1024,
    },
}
LARGE = {
    **FAMILIES["llama"],
    "hidden_size": 8192,
    "intermediate_size": 22016,
    "num_hidden_layers": 2,
}
LARGE |= {"num_attention_heads": 64}

pytestmark = pytest.mark.heavy  # plans count the activations of real layers


@pytest.fixture
def planned(tmp_path):
    """A recipe of pre-training a shape, as a file."""

    def written(shape: dict, *, lora: dict | None = None, **training) -> Path:
        model = {"from_scratch": True, "config": shape}
        if lora is not None:
            model = {"path": str(tmp_path / "base"), "lora": lora}
            (tmp_path / "base").mkdir()
            (tmp_path / "base/config.json").write_text(json.dumps(shape))
            (tmp_path / "base/model.safetensors").touch()
        sections = {
            "name": "run",
            "stage": "cpt" if lora else "pretrain",
            "model": model,
            "tokenizer": {"path": "nowhere"},
            "data": {"sequence_length": 512, "sources": [{"path": "documents"}]},
            "budget": {"tokens": 10**9},
            "training": {"per_device_train_batch_size": 8, "bf16": True, **training},
        }
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(sections))
        return tmp_path / "recipe.yaml"

    return written


def test_the_terms_of_each_moment_add_up_to_the_peak(planned):
    plan = plan_run(load_recipe(planned(FAMILIES["llama"])), "RTX 4090")
    assert plan.peak_bytes == max(sum(terms.values()) for terms in plan.gpu_terms.values())
    peak = max(plan.gpu_terms.values(), key=lambda terms: sum(terms.values()))
    assert {"weights", "activations"} <= peak.keys() and any(
        name.startswith("optimizer") for name in peak
    )
    assert all(size >= 0 for size in peak.values())


@pytest.mark.slow
def test_the_table_that_is_shown_adds_up(cpt, planned):
    shown = cpt("plan", planned(FAMILIES["llama"]), "--gpu", "RTX 4090").stdout
    table = shown.partition("Memory of the host")[0]
    of_gpu = [
        float(size)
        for size in re.findall(r"^  \S.*?\s{2,}(\d+\.\d\d)(?:\s|$)", table, re.MULTILINE)
    ]
    assert len(of_gpu) > 4 and of_gpu[-1] == pytest.approx(sum(of_gpu[:-1]), abs=0.05)
    peak = plan_run(load_recipe(planned(FAMILIES["llama"])), "RTX 4090").peak_bytes
    assert of_gpu[-1] == pytest.approx(peak / GIB, abs=0.01)


def test_weights_and_adams_moments_are_counted_to_the_byte(planned):
    """bfloat16 weights and gradients, an fp32 copy of the weights and two fp32 moments; the head is not tied."""
    terms = plan_run(load_recipe(planned(FAMILIES["llama"])), "RTX 4090").gpu_terms["the update"]
    layer = 512 * 512 * 2 + 512 * 256 * 2 + 3 * 512 * 1408 + 2 * 512
    parameters = 2 * 16000 * 512 + 4 * layer + 512
    found = terms["weights"], terms["optimizer and fp32 weights"], terms["gradients"]
    assert found == (2 * parameters, 12 * parameters, 2 * parameters)


def test_operations_of_a_token_are_those_counted_by_hand(planned):
    """6 for each weight of a matrix, but the embedding; attention: 2 x 2 x width for half of the row, three times."""
    matrices = 16000 * 512 + 4 * (512 * 512 * 2 + 512 * 256 * 2 + 3 * 512 * 1408)
    attention = 4 * (2 * 2 * 512 * 512 / 2)
    plan = plan_run(load_recipe(planned(FAMILIES["llama"])), "RTX 4090")
    assert plan.flops_per_token == pytest.approx(6 * matrices + 3 * attention, rel=0.01)


CELLS = [
    ("qwen3", True, None),
    ("qwen3", False, {"r": 16}),
    ("nemotron", True, {"r": 16}),
    ("gpt2", False, None),
]


@pytest.mark.parametrize(
    ("family", "recomputes", "lora"),
    [("llama", False, None), *(pytest.param(*cell, marks=pytest.mark.slow) for cell in CELLS)],
)
def test_a_plan_is_within_5_percent_of_a_dry_run_of_the_step(family, recomputes, lora, planned):
    file = planned(FAMILIES[family], lora=lora, gradient_checkpointing=recomputes)
    target = find_target("RTX 4090", 1, None)
    plan = plan_recipe(load_recipe(file, ["training.torch_compile=false"]), target, 1, 1)
    assert planned_bytes(plan.config, plan.setup) == pytest.approx(
        dry_run(plan.config, plan.setup), rel=0.05
    )


@pytest.mark.slow
def test_recomputing_takes_less_memory_and_more_time(planned):
    plain, recomputed = (
        plan_run(load_recipe(planned(FAMILIES["llama"], gradient_checkpointing=on)), "H200")
        for on in (False, True)
    )
    assert (
        recomputed.peak_bytes < plain.peak_bytes
        and recomputed.tokens_per_second < plain.tokens_per_second
    )
    assert recomputed.flops_per_token == plain.flops_per_token


@pytest.mark.slow
def test_a_run_that_does_not_fit_ends_with_3_and_its_cheapest_change_fits(cpt, planned, tmp_path):
    words = ("--gpu", "RTX 4090", "--host-memory", 64)
    file = planned(LARGE)
    assert cpt("plan", file, *words).returncode == 3
    assert cpt("plan", file, *words, "--write", tmp_path / "fits.yaml").returncode == 0
    assert cpt("plan", tmp_path / "fits.yaml", *words).returncode == 0
    before, after = (load_recipe(path) for path in (file, tmp_path / "fits.yaml"))
    assert (
        not plan_run(before, "RTX 4090", host_memory=64).fits
        and plan_run(after, "RTX 4090", host_memory=64).fits
    )
    assert after.model == before.model and after.budget == before.budget


def test_what_auto_stands_for_fits(planned):
    file = planned(
        FAMILIES["llama"],
        per_device_train_batch_size="auto",
        gradient_checkpointing="auto",
        use_cpu=True,
        bf16=False,
    )
    chosen = resolve_recipe(load_recipe(file, ["budget.global_batch_tokens=65536"]))
    training = chosen.training
    assert "auto" not in training.values() and training["per_device_train_batch_size"] >= 1
    plan = plan_run(chosen, "cpu")
    assert plan.fits and plan.tokens_per_step == 65536


def test_an_unknown_gpu_is_refused_with_the_one_that_was_meant(cpt, planned):
    with pytest.raises(ResourceError, match="RTX 4090"):
        plan_run(load_recipe(planned(FAMILIES["llama"])), "RTX 4900")
    ended = cpt("plan", planned(FAMILIES["llama"]), "--gpu", "RTX 4900")
    assert ended.returncode == 2 and "RTX 4090" in ended.stderr and "Traceback" not in ended.stderr
    known = cpt(
        "plan",
        planned(FAMILIES["llama"]),
        "--gpu",
        "RTX 4900",
        "--memory-gib",
        24,
        "--peak-tflops",
        165,
    )
    assert known.returncode == 0


PARAMETERS = 2 * 16000 * 512 + 4 * (512 * 512 * 2 + 512 * 256 * 2 + 3 * 512 * 1408 + 2 * 512) + 512


@pytest.fixture
def zero(tmp_path):
    """A DeepSpeed profile, as a key of `training`."""

    def written(**section) -> dict[str, str]:
        (tmp_path / "zero.json").write_text(
            json.dumps({"bf16": {"enabled": "auto"}, "zero_optimization": section})
        )
        return {"deepspeed": str(tmp_path / "zero.json")}

    return written


@pytest.mark.parametrize(
    ("stage", "expected"),
    [
        pytest.param(
            1, {"weights": 2, "gradients": 2, "optimizer": 12 / 4}, marks=pytest.mark.slow
        ),
        pytest.param(
            2, {"weights": 2, "gradients": 2 / 4, "optimizer": 12 / 4}, marks=pytest.mark.slow
        ),
        (3, {"weights": 2 / 4, "gradients": 2 / 4, "optimizer": 12 / 4}),
        ("fsdp", {"weights": 4 / 4, "gradients": 4, "optimizer": 8 / 4}),
    ],
)
def test_what_four_gpus_share_is_counted_to_the_byte(stage, expected, planned, zero):
    """ZeRO shares bf16 weights, gradients and an fp32 copy with two moments; FSDP keeps gradients of a step whole."""
    engine = (
        {"fsdp": True, "gradient_accumulation_steps": 2} if stage == "fsdp" else zero(stage=stage)
    )
    terms = plan_run(load_recipe(planned(FAMILIES["llama"], **engine)), "H100", gpus=4).gpu_terms[
        "the update"
    ]
    sizes = {
        word: next(terms[name] for name in terms if name.startswith(word)) for word in expected
    }
    found = {word: size / PARAMETERS for word, size in sizes.items()}
    assert found == pytest.approx(expected)


def test_a_run_needs_memory_of_the_host_too(planned, zero):
    file = planned(FAMILIES["llama"], **zero(stage=3, offload_optimizer={"device": "cpu"}))
    little, enough = (
        plan_run(load_recipe(file), "RTX 4090", host_memory=size).fits for size in (2, 256)
    )
    assert enough and not little


@pytest.mark.slow
def test_accumulation_takes_its_time(planned):
    once, four = (
        plan_run(load_recipe(planned(FAMILIES["llama"], gradient_accumulation_steps=steps)), "H100")
        for steps in (1, 4)
    )
    assert four.tokens_per_step == 4 * once.tokens_per_step
    assert four.tokens_per_second == pytest.approx(once.tokens_per_second, rel=0.3)


@pytest.mark.slow
def test_adapters_need_a_fraction_of_the_optimizers_memory(planned):
    whole, adapters = (
        plan_run(load_recipe(planned(LARGE, lora=lora)), "H200").gpu_terms["the update"]
        for lora in (None, {"r": 8})
    )
    assert adapters["optimizer"] < whole["optimizer and fp32 weights"] / 20
