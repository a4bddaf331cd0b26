"""The pages of `cpt plan` as approved, for models that are not counted but given."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from approved import check_approved
from planned_setups import FACTS, PLAIN
from transformers import AutoConfig

from cpt.errors import RecipeError, ResourceError
from cpt.models.config import config_from
from cpt.planning import plan
from cpt.planning.activations import ActivationCounts, Activations
from cpt.planning.fitting import FittingPlan
from cpt.planning.memory import plan_memory
from cpt.planning.model_sizes import TAUGHT, TILES, StageNeeds
from cpt.planning.plan import (
    PlannedRun,
    config_without_weights,
    plan_recipe,
    print_plan,
    print_proposals,
)
from cpt.planning.speed import find_target
from cpt.planning.workload import Sharding
from cpt.recipe.schema import Model, Recipe

HERE = Path(__file__).parent
MIB = 2**20
SIZES = replace(
    FACTS,
    parameters=3_210_000_000,
    trained=3_210_000_000,
    head=262_000_000,
    embedding=262_000_000,
    vocabulary=128_000,
    hidden=2048,
    largest_matrix=262_000_000,
    largest_layer=60_000_000,
    flops_per_token=2e10,
    cached=65_536,
)
ROW = Activations(
    kept=1300 * MIB, layer_inputs=110 * MIB, backward=70 * MIB, again=190 * MIB, layers=28
)
COUNTS = ActivationCounts(ROW, ROW.times(2))
SETUP = replace(PLAIN, sequence_length=2048, micro_batch=3, accumulation=5)
ON_HOST = Sharding(3, offload_optimizer=True, offload_parameters=True)
ADAPTERS = {"lora": {"r": 3}}
GRPO = StageNeeds("grpo", TILES, completion=50, steps_per_generation=40, reference=True)
GKD = StageNeeds("gkd", TAUGHT, completion=50, teacher=FACTS, uncounted=("a", "b"), sequences=1)


def recipe(tokens: int | None = 10**9, **safety) -> Recipe:
    budget = {"tokens": tokens, "global_batch_tokens": 2048 * 15}
    if tokens is None:
        budget = {"epochs": 2, "global_batch_tokens": 2048 * 15}
    return Recipe.model_validate(
        {
            "name": "run",
            "model": {"path": "base"},
            "data": {"sequence_length": 2048, "sources": [{"path": "documents"}]},
            "budget": budget,
            "checkpoints": {"every_steps": 0.1, "keep": 2},
            "safety": safety,
        }
    )


def planned(written=None, sizes=SIZES, counts=COUNTS, **changes) -> PlannedRun:
    setup = replace(SETUP, **changes)
    if setup.lora is not None:
        sizes = replace(sizes, trained=24_300_000)
    return PlannedRun(
        recipe=written or recipe(),
        config=AutoConfig.for_model("llama"),
        setup=setup,
        facts=sizes,
        activations=counts,
        memory=plan_memory(sizes, setup, counts),
    )


ESTIMATED = ActivationCounts(replace(ROW, is_counted=False), replace(ROW, is_counted=False))
CPU = {"on_cpu": True, "half": False, "weights_bytes": 4}
H100 = find_target("H100", 1, 64.0)


def pages():
    return {
        "one GPU": (planned(), H100),
        "adapters": (planned(**ADAPTERS), find_target("RTX 4090", 1, 64.0)),
        "parts": (planned(sizes=replace(SIZES, trained=1_234_000_000)), H100),
        "a limit": (planned(recipe(max_gpu_memory=0.5)), H100),
        "a limit on the CPU": (
            planned(recipe(max_gpu_memory=0.5), **CPU),
            find_target("cpu", 1, 64.0),
        ),
        "the CPU": (planned(**CPU, gpus=3), find_target("cpu", 1, 640.0)),
        "two machines": (
            planned(gpus=6, nodes=2, zero=ON_HOST, checkpointing=True),
            find_target("RTX 4090", 6, None),
        ),
        "offloaded weights": (
            planned(gpus=2, zero=replace(ON_HOST, offload_optimizer=False)),
            find_target("RTX 4090", 2, 16.0),
        ),
        "FSDP2": (planned(gpus=8, zero=Sharding(3, is_fsdp=True)), find_target("H100", 8, 64.0)),
        "estimated, in epochs": (planned(recipe(None), counts=ESTIMATED), H100),
        "pairs": (planned(needs=StageNeeds("dpo", TILES, reference=True, sequences=2)), H100),
        "pairs of adapters": (
            planned(**ADAPTERS, needs=StageNeeds("dpo", TILES, reference=True, sequences=2)),
            H100,
        ),
        "sampling": (planned(needs=GRPO, accumulation=500), H100),
        "sampling of a student": (
            planned(needs=GKD, **ADAPTERS, micro_batch=1, sizes=replace(SIZES, cached=10**7)),
            H100,
        ),
    }


def test_pages_of_a_plan_are_as_approved(capsys, monkeypatch):
    monkeypatch.setattr("cpt.planning.speed.find_gpus", list)
    for name, (run, target) in pages().items():
        target = replace(target, peak_flops=1e14, host_source="as given")
        print(f"== {name}")
        price = 2.5 if name in ("one GPU", "FSDP2", "the CPU") else None
        options = {"measured": None, "price": price}
        print_plan(run, target, mfu=0.4, **options)
    check_approved(capsys.readouterr().out, HERE / "approved_pages.txt")


def test_the_speed_of_a_measured_run_replaces_the_estimate(tmp_path, capsys):
    lines = [{"loss": 3.0, "tokens_per_second": rate} for rate in (10, 2000, 2000, 2000)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(json.dumps(line) for line in lines) + "\n")
    run = planned(needs=GRPO)
    print_plan(run, H100, mfu=0.4, measured=tmp_path, price=None)
    page = capsys.readouterr().out
    # 10^9 tokens take 500,000 s
    assert "Speed: 2,000 tokens/s" in page and "5.8 days for 1,000,000,000 tokens" in page
    assert "--measured RUN" not in page


def proposal(changes, slower, others=(), **setup):
    run = planned(**setup)
    return FittingPlan(run.setup, run.memory, changes, 1.0, slower, tuple(others))


def test_proposals_are_as_approved(capsys):
    fewer = {"training.per_device_train_batch_size": 1, "training.deepspeed": None}
    adapters = proposal({"model.lora": {"r": 16}}, 0.9, **ADAPTERS)
    halved = proposal({"model.dtype": "bfloat16", **fewer}, 1.234, micro_batch=1)
    released = proposal(fewer, 1.5, [halved, adapters], releases=True, accumulation=1)
    print_proposals(released, H100)
    print_proposals(adapters, H100)
    print_proposals(replace(adapters, others=(halved,)), H100)
    print_proposals(replace(halved, setup=replace(SETUP, **CPU)), find_target("cpu", 1, 64.0))
    check_approved(capsys.readouterr().out, HERE / "approved_proposals.txt")


def test_without_the_hub_the_plan_is_for_the_config_of_the_recipe(monkeypatch, caplog):
    def fail(model):
        raise ResourceError("the Hub cannot be reached.")

    monkeypatch.setattr(plan, "load_config", fail)
    written = {"model_type": "llama", "hidden_size": 48, "num_attention_heads": 6}
    config = config_without_weights(Model(path="a/b", config=written))
    assert config.hidden_size == 48
    assert "not compared" in caplog.text and "a/b" in caplog.text
    with pytest.raises(ResourceError, match=r"cannot be reached\. .*`model\.config`"):
        config_without_weights(Model(path="a/b"))


def test_a_plan_of_a_recipe_has_its_processes_and_what_it_saves(load, monkeypatch):
    monkeypatch.setattr(plan, "count_model", lambda *_: (SIZES, COUNTS))
    written = load(
        training={"per_device_train_batch_size": 1, "dataloader_num_workers": 3},
        checkpoints={"every_steps": 1, "in_background": False},
    )
    target = find_target("RTX 4090", 4, 64.0)
    run = plan_recipe(written, target, 4, 2)
    assert (run.setup.gpus, run.setup.nodes, run.setup.micro_batch) == (4, 2, 1)
    assert run.config.hidden_size == config_from(written.model.config).hidden_size
    workers = plan_memory(run.facts, run.setup, run.activations, workers=3)
    assert run.memory.host.terms == workers.host.terms
    saved = load(training=written.training, checkpoints={"every_steps": 1, "in_background": True})
    assert plan_recipe(saved, target, 4, 2).memory.host.size > run.memory.host.size
    with pytest.raises(RecipeError, match="global_batch_tokens"):
        plan_recipe(written, target, 3, 1)
    with pytest.raises(RecipeError, match="fsdp"):
        plan_recipe(load(training={**written.training, "fsdp": True, "fp16": True}), target, 4, 1)
