"""What is changed so that a recipe fits (the least, and nothing where it fits already), and values for `auto`."""

from dataclasses import replace
from functools import lru_cache

import pytest
import torch
from planned_setups import FACTS, PLAIN, SHAPES
from transformers import AutoConfig

from cpt.errors import RecipeError
from cpt.hardware import GIB, Gpu
from cpt.planning import fitting
from cpt.planning.activations import ActivationCounts, Activations, count_activations
from cpt.planning.fitting import (
    FSDP2,
    PlanSearch,
    cheapest_that_fits,
    choose_batch,
    divisors_of_batch,
    fits,
    nodes_here,
    this_machine,
    with_adapters,
    with_all_parameters,
    with_chosen_values,
    with_placeholders,
)
from cpt.planning.memory import plan_memory
from cpt.planning.model_sizes import PAIRS, StageNeeds, sizes_of_model
from cpt.planning.speed import assumed_mfu, find_target, planned_speed
from cpt.planning.workload import Sharding, read_setup
from cpt.recipe.schema import Model, Recipe

LLAMA_1B = AutoConfig.for_model(
    "llama",
    vocab_size=128256,
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=16,
    num_key_value_heads=8,
    tie_word_embeddings=True,
)


# --- a recipe that does not fit -----------------------------------------------------------------------------------


@lru_cache
def cached(weights_bytes, lora):
    setup = replace(
        PLAIN, sequence_length=4096, weights_bytes=weights_bytes, lora=dict(lora) if lora else None
    )
    return sizes_of_model(LLAMA_1B, setup.lora, 4096), count_activations(LLAMA_1B, setup)


def count(setup):
    return cached(setup.weights_bytes, tuple(sorted((setup.lora or {}).items())))


def setup_for(**changes):
    return replace(PLAIN, sequence_length=4096, weights_bytes=4, **changes)


def proposal_for(host=64.0, **changes):
    return cheapest_that_fits(
        setup_for(**changes), find_target("RTX 4080", 1, host), count, mfu=0.35
    )


@pytest.mark.slow
def test_without_room_on_the_host_adapters_and_smaller_states_are_both_offered_the_cheaper_first():
    found = proposal_for(host=8.0, accumulation=2)
    both = (found, *found.others)
    adapters, small = sorted(both, key=lambda way: "model.lora" not in way.changes)
    assert adapters.changes["model.lora"] == {"r": 16} and found.slower <= found.others[0].slower
    assert small.changes["model.dtype"] == "bfloat16" and "8bit" in small.changes["optimizer.name"]
    assert all(fits(way.plan, find_target("RTX 4080", 1, 8.0)) for way in both)


@pytest.mark.slow
def test_where_the_hosts_memory_is_unknown_changes_that_need_no_host_are_offered_too():
    unknown = replace(find_target("RTX 4080", 1, None), host_memory_gib=8.0)
    first = cheapest_that_fits(setup_for(), unknown, count, mfu=0.35)
    assert first.setup.zero.offload_optimizer and first.plan.host.size > 8 * GIB
    assert ["model.lora" in way.changes for way in first.others].count(True) == 1 and len(
        first.others
    ) == 2
    known = proposal_for()
    assert known.changes == first.changes and not known.others


@pytest.mark.slow
def test_a_run_that_fits_nowhere_has_no_proposal():
    assert proposal_for(host=8.0, micro_batch=1, lora={"r": 16}) is not None
    tiny = find_target("thing", 1, 64.0, memory=2.0, peak_tflops=10.0)
    assert cheapest_that_fits(setup_for(), tiny, count, mfu=0.35) is None


@pytest.mark.slow
def test_several_gpus_may_divide_the_run_with_fsdp2_and_keep_compiled_layers():
    setup = setup_for(gpus=4, fused_loss=True, compiles=True, accumulation=4)
    target = find_target("mine", 4, 64.0, memory=24, peak_tflops=100)
    found = cheapest_that_fits(setup, target, count, mfu=0.35)
    assert found is not None and found.changes["training.fsdp"] is True and found.setup.compiles
    on_one = with_all_parameters(replace(setup, gpus=1), find_target("RTX 4090", 1, 64.0))
    assert not any("training.fsdp" in changes for _, changes in on_one)


def test_layers_are_compiled_under_a_proposed_fsdp2_and_not_under_a_zero3_profile():
    target = find_target("RTX 4090", 4, 64.0)
    for changed, changes in with_all_parameters(setup_for(gpus=4, compiles=True), target):
        breaks_graphs = (
            changed.zero is not None and changed.zero.stage == 3 and not changed.zero.is_fsdp
        )
        assert changed.compiles is not breaks_graphs
        assert (changes.get("training.torch_compile") is False) is breaks_graphs


# of a model of 1.2 billion parameters, without counting
SIZES = replace(
    FACTS,
    parameters=1_200_000_000,
    trained=1_200_000_000,
    head=262_000_000,
    embedding=262_000_000,
    vocabulary=128_000,
    hidden=2048,
    largest_matrix=262_000_000,
    largest_layer=60_000_000,
    flops_per_token=7.2e9,
)
ROW = Activations(kept=3 * GIB, layer_inputs=GIB // 4, backward=GIB // 4, again=GIB // 2, layers=16)
ROWS = ActivationCounts(ROW, ROW.times(2))


def given_counts(setup):
    adapters = setup.lora is not None
    return replace(SIZES, trained=10_000_000) if adapters else SIZES, ROWS


def search(gib=80.0, gpus=1, share=1.0, host=64.0, **changes):
    target = find_target("mine", gpus, host, memory=gib, peak_tflops=100)
    return PlanSearch(setup_for(gpus=gpus, **changes), target, given_counts, mfu=0.4, share=share)


def test_the_cost_of_a_plan_is_its_seconds_with_a_penalty_for_each_change():
    searching = search(micro_batch=8, accumulation=3, compiles=True)
    own = searching.setup
    slower = replace(own, micro_batch=2, accumulation=12, checkpointing=True, compiles=False)
    changes = {
        "training.per_device_train_batch_size": 2,
        "training.gradient_accumulation_steps": 12,
        "training.gradient_checkpointing": True,
        "training.torch_compile": False,
    }
    plan = searching.plan(slower, changes)

    def seconds(setup, mfu):
        speed = planned_speed(SIZES, setup, searching.target, mfu)
        return 8 * 3 * 4096 / speed.tokens_per_second

    expected = seconds(slower, 0.4 * assumed_mfu(slower) / assumed_mfu(own))
    assert assumed_mfu(slower) < assumed_mfu(own)
    assert plan.slower == pytest.approx(expected / seconds(own, 0.4))
    # accumulation and compiling follow from other changes, and 8 rows are halved twice
    assert plan.cost == pytest.approx(expected * 1.03**2 * 1.05**2)
    assert (plan.setup, plan.changes) == (slower, changes)
    assert plan.plan.peak.size == plan_memory(SIZES, slower, ROWS).peak.size


@pytest.mark.parametrize("host", [64.0, None])
def test_offloading_to_a_host_of_unknown_memory_costs_a_tenth_more(host):
    searching = search(host=host)
    zero = Sharding(2, offload_optimizer=True)
    plan = searching.plan(replace(searching.setup, zero=zero, weights_bytes=2), {"a": 1})
    seconds = searching.step_seconds(plan.setup, 0.4)
    assert plan.cost == pytest.approx(seconds * 1.03 * (1 if host else 1.1))


def test_a_plan_fits_up_to_the_share_that_is_usable_and_a_proposal_to_a_share_less():
    peak = plan_memory(SIZES, setup_for(), ROWS).peak.size / GIB
    for gib, fits_unchanged, fits_changed in (
        (0.99 * peak / 0.98, False, False),
        (1.01 * peak / 0.98, True, False),
        (1.01 * peak / 0.98 / 0.95, True, True),
    ):
        for share in (1.0, 0.5):
            searching = search(gib=gib / share, share=share)
            assert (searching.plan(setup_for(), {}) is not None) is fits_unchanged
            assert (searching.plan(setup_for(), {"a": 1}) is not None) is fits_changed


def test_the_memory_of_a_host_counts_if_it_is_known():
    on_host = setup_for(zero=Sharding(3, offload_optimizer=True, offload_parameters=True))
    plan = plan_memory(SIZES, on_host, ROWS)
    needed = plan.host.size / GIB / 0.92
    enough, little = (find_target("H100", 1, factor * needed) for factor in (1.01, 0.99))
    assert fits(plan, enough) and not fits(plan, little)
    assert fits(plan, replace(little, host_is_known=False))
    on_cpu = setup_for(on_cpu=True, half=False)
    plan = plan_memory(SIZES, on_cpu, ROWS)
    needed = plan.peak.size / GIB / 0.92
    assert fits(plan, find_target("cpu", 1, 1.01 * needed))
    assert not fits(plan, find_target("cpu", 1, 0.99 * needed))


def proposal(gib, host=64.0, *, is_allowed=lambda _: True, **changes):
    searching = search(gib, host=host, **changes)
    return cheapest_that_fits(
        searching.setup, searching.target, given_counts, mfu=0.4, is_allowed=is_allowed
    )


def test_the_proposal_is_the_cheapest_that_is_allowed():
    assert proposal(80).changes == {} and proposal(80).others == ()
    first = proposal(19, micro_batch=2)
    assert first.changes and "model.lora" not in first.changes and first.others == ()
    refused = []

    def is_allowed(changes):
        if len(refused) < 2:
            refused.append(changes)
            return False
        return True

    third = proposal(19, micro_batch=2, is_allowed=is_allowed)
    assert refused[0] == first.changes and third.changes not in refused
    assert third.cost >= first.cost
    assert proposal(19, micro_batch=2, is_allowed=lambda _: False) is None
    assert proposal(0.5) is None


def test_without_memory_on_the_host_adapters_and_smaller_states_are_proposed_the_cheaper_first():
    both = proposal(12, host=6.0)
    plans = (both, *both.others)
    assert sorted("model.lora" in plan.changes for plan in plans) == [False, True]
    assert plans[0].cost <= plans[1].cost
    unknown = replace(search(12, host=None).target, host_memory_gib=6.0)
    first = cheapest_that_fits(setup_for(), unknown, given_counts, mfu=0.4)
    assert first.setup.zero.offload_optimizer and len(first.others) == 2
    enough = replace(unknown, host_memory_gib=64.0)
    assert cheapest_that_fits(setup_for(), enough, given_counts, mfu=0.4).others == ()


def test_sharded_weights_in_half_precision_become_fp32_parts():
    target = find_target("H100", 4, 64.0)
    for weights_bytes, half in ((2, True), (4, True), (4, False)):
        setup = replace(PLAIN, gpus=4, weights_bytes=weights_bytes, half=half)
        (changes, *_) = (
            changes
            for changed, changes in with_all_parameters(setup, target)
            if changed.zero is FSDP2
        )
        assert changes.get("model.dtype") == ("auto" if weights_bytes == 2 else None)
        assert changes.get("training.bf16") == (None if half else True)


def test_adapters_replace_the_engine_and_are_fp32_only_on_a_cpu():
    for target, setup, added, bytes_each in (
        (find_target("H100", 2, 64.0), replace(PLAIN, gpus=2, zero=FSDP2), {}, 2),
        (find_target("H100", 1, 64.0), replace(PLAIN, half=False), {"training.bf16": True}, 2),
        (find_target("cpu", 1, 64.0), replace(PLAIN, half=False), {}, 4),
    ):
        (changed, changes), *_ = with_adapters(setup, target)
        assert (changed.weights_bytes, changed.zero, changed.lora) == (bytes_each, None, {"r": 16})
        engine = {"training.fsdp": None, "training.fsdp_config": None} if setup.zero else {}
        assert changes == {"model.lora": {"r": 16}, **engine, **added}
    for refused in ({"lora": {"r": 2}}, {"from_scratch": True}, {"train_only": "lm_head"}):
        assert list(with_adapters(replace(PLAIN, **refused), target)) == []


# --- this machine -------------------------------------------------------------------------------------------------


def test_a_target_is_the_smallest_gpu_or_a_process_share_of_the_host(monkeypatch):
    monkeypatch.setattr(fitting, "host_memory_gib", lambda: 48.0)
    small, large = (
        Gpu(name, gib, gib, "580", "9.0")
        for name, gib in (("Other", 20.0), ("NVIDIA H100 80GB HBM3", 79.6))
    )
    target = this_machine(3, on_cpu=False, gpus=[large, small])
    assert (target.name, target.gpus, target.memory_gib) == ("Other", 3, 20.0)
    assert (target.peak_flops, target.host_memory_gib) == (150e12, 48.0)
    monkeypatch.setattr(fitting, "find_gpus", lambda: [large])
    target = this_machine(2, on_cpu=False)
    assert (target.memory_gib, target.peak_flops) == (79.6, pytest.approx(989.4e12))
    for target in (this_machine(3, on_cpu=True), this_machine(3, on_cpu=False, gpus=[])):
        assert (target.on_cpu, target.memory_gib, target.host_memory_gib) == (True, 16.0, 48.0)


@pytest.mark.parametrize(("processes", "nodes", "expected"), [(8, 2, 2), (7, 2, 1), (1, 1, 1)])
def test_machines_count_if_they_have_equal_numbers_of_processes(
    monkeypatch, processes, nodes, expected
):
    monkeypatch.setattr(fitting, "world_size", lambda: processes)
    monkeypatch.setattr(fitting, "num_nodes", lambda: nodes)
    assert nodes_here() == expected


# --- auto ---------------------------------------------------------------------------------------------------------


def recipe(tokens=1_000_000, safety=None, **training: object) -> Recipe:
    return Recipe.model_validate(
        {
            "name": "run",
            "model": {"from_scratch": True, "config": SHAPES["llama"]},
            "data": {"sequence_length": 512, "sources": [{"path": "documents"}]},
            "budget": {"tokens": tokens, "global_batch_tokens": 512 * 48},
            "safety": safety or {},
            "training": training,
        }
    )


def card(gib, gpus=1):
    return find_target("mine", gpus, 64.0, memory=gib, peak_tflops=100)


@pytest.mark.parametrize(
    ("rows", "processes", "sequences", "expected"),
    [
        (48, 1, 1, [1, 2, 3, 4, 6, 8, 12, 16, 24, 48]),
        (48, 4, 1, [1, 2, 3, 4, 6, 12]),
        (50, 4, 1, [1, 2, 3, 4, 6, 12]),
        (3, 4, 1, [1]),
        (128, 1, 2, [1, 2, 4, 8, 16, 32]),
        (None, 1, 1, [1]),
    ],
)
def test_micro_batches_divide_a_process_rows_and_have_at_most_32768_tokens(
    rows, processes, sequences, expected
):
    written = recipe()
    tokens = None if rows is None else 512 * rows
    budget = written.budget.model_copy(update={"global_batch_tokens": tokens})
    needs = StageNeeds("orpo", PAIRS, sequences=sequences)
    sizes = divisors_of_batch(
        written.model_copy(update={"budget": budget}), replace(PLAIN, needs=needs), processes
    )
    assert sizes == expected


def chosen_batch(monkeypatch, gib, rows=ROWS, **training):
    monkeypatch.setattr(fitting, "count_model", lambda *_: (SIZES, rows))
    config = AutoConfig.for_model("llama", num_hidden_layers=1)
    setup, counts = choose_batch(recipe(bf16=True, **training), None, config, card(gib), 1)
    assert counts == (SIZES, rows)
    return setup.micro_batch, setup.checkpointing


def test_the_fastest_rows_that_fit_are_chosen_and_otherwise_the_smallest(monkeypatch):
    rows = {"per_device_train_batch_size": "auto"}
    layers = {"gradient_checkpointing": "auto"}
    assert chosen_batch(monkeypatch, 1000, **rows) == (48, False)
    assert chosen_batch(monkeypatch, 1000, **rows, **layers) == (48, False)
    sizes = [chosen_batch(monkeypatch, gib, **rows)[0] for gib in (30, 40, 60)]
    assert sizes == sorted(set(sizes)) and all(48 % size == 0 for size in sizes)
    assert chosen_batch(monkeypatch, 1, **rows, **layers) == (1, True)
    assert chosen_batch(monkeypatch, 1, **rows) == (1, False)
    assert chosen_batch(monkeypatch, 1, **layers, per_device_train_batch_size=6) == (6, True)
    assert chosen_batch(monkeypatch, 1000, **layers, per_device_train_batch_size=6) == (6, False)


def test_a_plan_that_knows_the_links_chooses_as_the_run_that_does_not(monkeypatch):
    """Where slow links would favor recomputed layers of larger micro-batches."""
    monkeypatch.setattr(fitting, "count_model", lambda *_: (SIZES, ROWS))
    config = AutoConfig.for_model("llama", num_hidden_layers=1)
    written = recipe(bf16=True, per_device_train_batch_size="auto", gradient_checkpointing="auto")
    profile = {"zero_optimization": {"stage": 3}}
    for target in (card(16, gpus=4), replace(card(16, gpus=4), gpu_link=0.0)):
        setup, _ = choose_batch(written, profile, config, target, 4)
        assert (setup.micro_batch, setup.checkpointing) == (1, False)


def test_threads_of_the_loader_start_at_none_and_other_values_are_as_written(capsys):
    written = recipe(
        dataloader_num_workers="auto", dataloader_prefetch_factor="auto", logging_steps=3
    )
    chosen = with_chosen_values(written, target=card(24))
    assert chosen.training == {
        "dataloader_num_workers": 0,
        "logging_steps": 3,
        "torch_compile": False,
    }
    printed = capsys.readouterr().out
    assert "training.dataloader_num_workers: auto is 0 there." in printed
    assert "training.dataloader_prefetch_factor: auto is set by the other keys there." in printed


def test_auto_becomes_numbers_for_this_machine(capsys):
    written = recipe(
        per_device_train_batch_size="auto", gradient_accumulation_steps="auto", logging_steps=7
    )
    chosen = with_chosen_values(written).training
    assert 48 % chosen["per_device_train_batch_size"] == 0
    assert chosen.keys() == {"per_device_train_batch_size", "logging_steps"}
    assert written.training["per_device_train_batch_size"] == "auto", (
        "the run is known by the recipe as written"
    )
    assert (
        f"per_device_train_batch_size: auto is {chosen['per_device_train_batch_size']}"
        in capsys.readouterr().out
    )


@pytest.mark.heavy
@pytest.mark.parametrize("gib", [1.2, 3, 16])
def test_auto_recomputes_layers_only_if_that_helps(gib):
    both = {"per_device_train_batch_size": "auto", "gradient_checkpointing": "auto"}
    written = recipe(**both, bf16=True, torch_compile=False)
    chosen = with_chosen_values(written, target=card(gib), processes=1).training
    assert (
        chosen["gradient_checkpointing"] is (gib < 2)
        and 48 % chosen["per_device_train_batch_size"] == 0
    )


@pytest.mark.heavy
def test_auto_fills_only_the_share_of_the_card_that_the_recipe_allows():
    def micro_batch(gib, share=None):
        written = recipe(
            safety={"max_gpu_memory": share},
            per_device_train_batch_size="auto",
            torch_compile=False,
        )
        chosen = with_chosen_values(written, target=card(gib), processes=1).training
        return chosen["per_device_train_batch_size"]

    assert micro_batch(8, share=0.25) == micro_batch(2) < micro_batch(8)


def test_a_cpu_has_no_limit():
    assert (card(8).usable_share(0.8), card(8).usable_share(None)) == (0.8, 1.0)
    assert find_target("cpu", 1, 64.0).usable_share(0.8) == 1.0


def test_a_model_that_cannot_be_planned_needs_a_number(monkeypatch):
    def fails(*_):
        raise KeyError("no layers")

    monkeypatch.setattr(fitting, "count_model", fails)
    with pytest.raises(RecipeError, match="gradient_checkpointing: auto"):
        with_chosen_values(recipe(gradient_checkpointing="auto"))


@pytest.fixture
def fallbacks(monkeypatch, caplog):
    """Choose values on a machine with a GPU; return the recipe, and details of what falls back, by key."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def choose(asked, **options):
        chosen = with_chosen_values(asked, **options)
        details = [
            record.details for record in caplog.records if vars(record).get("event") == "fallback"
        ]
        return chosen, {detail["key"]: detail for detail in details}

    return choose


def test_a_machine_without_a_compiler_runs_uncompiled(fallbacks, monkeypatch):
    monkeypatch.setattr("cpt.hardware.find_program", lambda name: None)
    chosen, details = fallbacks(recipe(10**9, bf16=True))
    assert chosen.training["torch_compile"] is False
    assert "g++" in details["training.torch_compile"]["reason"]


def test_without_triton_layers_are_not_compiled_and_the_plan_has_fp32_weights(
    fallbacks, monkeypatch
):
    monkeypatch.setenv("CPT_TRITON_FAILURE", "no C compiler")
    chosen, details = fallbacks(recipe(10**9, bf16=True))
    setup = read_setup(chosen, 1, None, attention="sdpa")
    assert (
        chosen.training["torch_compile"] is False
        and setup.weights_bytes == 4
        and not setup.compiles
    )
    values = {key: (detail["value"], detail["reason"]) for key, detail in details.items()}
    assert values == {
        "training.torch_compile": (False, "no C compiler"),
        "model.dtype": ("float32", "no C compiler"),
    }


@pytest.mark.parametrize(
    ("processes", "gpus", "is_compiled"), [(1, 1, True), (1, 2, False), (2, 2, True)]
)
def test_layers_are_compiled_unless_one_process_has_several_gpus(
    fallbacks, monkeypatch, capsys, processes, gpus, is_compiled
):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    chosen, details = fallbacks(recipe(10**9, bf16=True), processes=processes)
    assert chosen.training["torch_compile"] is is_compiled and details == {}
    assert ("DataParallel" in capsys.readouterr().out) is not is_compiled


@pytest.mark.parametrize("lora", [None, {"r": 8}])
def test_a_base_under_adapters_and_weights_of_another_machine_need_no_triton(
    fallbacks, monkeypatch, lora
):
    monkeypatch.setenv("CPT_TRITON_FAILURE", "no C compiler")
    asked = recipe(10**9, bf16=True)
    asked = asked.model_copy(update={"model": asked.model.model_copy(update={"lora": lora})})
    _, details = fallbacks(asked, target=None if lora else card(24))
    assert "model.dtype" not in details and ("training.torch_compile" in details) is bool(lora)


@pytest.mark.parametrize(("gpu", "compiles"), [("RTX 5090", False), ("RTX 4090", True)])
def test_a_plan_for_another_gpu_knows_where_compiled_autocast_is_wrong(gpu, compiles):
    written = recipe(10**9, bf16=True, torch_compile="auto").model_copy(
        update={"model": Model(path="x", lora={"r": 8})}
    )
    chosen = with_chosen_values(
        written, config=LLAMA_1B, target=find_target(gpu, 1, 64.0), processes=1
    )
    assert chosen.training["torch_compile"] is compiles


def test_layers_are_not_compiled_on_a_cpu_and_nothing_is_printed(capsys):
    automatic = recipe(10**9, bf16=True, torch_compile="auto")
    assert with_chosen_values(recipe(10**9, bf16=True)).training.keys() == {"bf16"}
    assert with_chosen_values(automatic).training["torch_compile"] is False
    assert with_placeholders(automatic).training["torch_compile"] is False
    assert capsys.readouterr().out == ""
