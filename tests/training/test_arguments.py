"""From the recipe to the arguments of the Trainer: length of a run, shared rows, prompts of a step."""

import os
import re
from types import SimpleNamespace

import pytest
import torch
import trl
from tiny import TINY
from transformers import AutoConfig

from cpt.data.rows.mixture import shift_past_skipped
from cpt.errors import RecipeError
from cpt.models.inventory import build_on_meta
from cpt.optim.adamw import automatic_dtype
from cpt.recipe.schema import Recipe
from cpt.training.arguments import (
    limit_gpu_memory,
    run_length,
    training_arguments,
    warn_of_rounding,
)
from cpt.training.engine import check_parallelism, parallelism_config
from cpt.training.generations import Generations, PromptRows, check_generations, prompts_of_step
from cpt.training.restart import remember_micro_batch


def recipe(**changes):
    """20 steps of 8 rows of 64 tokens."""
    sections = {
        "name": "a-run",
        "model": {"path": "some/model"},
        "data": {"sequence_length": 64, "sources": [{"path": "a.txt"}]},
        "budget": {"tokens": 10_000, "global_batch_tokens": 512},
        "training": {"per_device_train_batch_size": 2},
    }
    return Recipe.model_validate({**sections, **changes})


def arguments(recipe, tmp_path, held_out=("a",)):
    return training_arguments(
        recipe, tmp_path, SimpleNamespace(form="document", num_rows=100, held_out=held_out)
    )


OURS = {
    "run_name": "run",
    "seed": 7,
    "max_steps": 20,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "learning_rate": 5e-4,
    "report_to": [],
    "disable_tqdm": True,
    "logging_nan_inf_filter": False,
    "ignore_data_skip": True,
    "remove_unused_columns": False,
    "use_cpu": True,
    "save_strategy": "steps",
    "save_steps": 20,
    "eval_strategy": "no",
    "eval_on_start": False,
    "logging_steps": 10,
    "dataloader_pin_memory": False,
    "per_device_eval_batch_size": 2,
    "gradient_checkpointing": False,
    "bf16": False,
    "deepspeed": None,
}


def test_the_trainer_gets_what_the_recipe_says_and_else_our_defaults(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    about = {"seed": 7, "optimizer": {"learning_rate": 5e-4}}

    def made(held_out=(), stage="cpt", **training):
        training = {"per_device_train_batch_size": 2, **training}
        given = arguments(
            recipe(**about, stage=stage, training=training), tmp_path / "run", held_out
        )
        return {name: getattr(given, name) for name in OURS}, given

    for stage in ("cpt", "dpo"):
        found, given = made(stage=stage)
        assert found == OURS and given.output_dir == str(tmp_path / "run")
    assert (given.max_length, given.trust_remote_code) == (64, False)
    evaluated = {"eval_strategy": "steps", "eval_on_start": True}
    assert made(("a",))[0] == OURS | evaluated
    own = {"logging_steps": 3, "per_device_eval_batch_size": 5}
    assert made(**own, bf16=True, use_cpu=True, project="mine")[0] == OURS | own | {"bf16": True}
    assert os.environ.pop("WANDB_PROJECT") == "mine"
    plain = arguments(recipe(**about, training={}), tmp_path / "run", ())
    sizes = (plain.per_device_train_batch_size, plain.per_device_eval_batch_size)
    assert sizes == (8, 8) and plain.gradient_accumulation_steps == 1


def test_intervals_in_tokens_become_steps(tmp_path):
    made = arguments(
        recipe(checkpoints={"every_tokens": 1500, "keep": 2}, evaluation={"every_steps": 7}),
        tmp_path,
    )
    assert (made.save_steps, made.save_total_limit, made.eval_steps, made.eval_on_start) == (
        3,
        None,
        7,
        True,
    )


def test_without_intervals_only_the_end_is_saved_and_evaluated(tmp_path):
    made = arguments(recipe(), tmp_path)
    assert (made.save_steps, made.eval_steps, made.max_steps) == (20, 20, 20)
    assert arguments(recipe(), tmp_path, held_out=()).eval_strategy == "no"


def test_what_hugging_face_refuses_is_a_recipe_error(tmp_path):
    with pytest.raises(RecipeError, match="`training`"):
        arguments(recipe(training={"logging_strategy": "sometimes"}), tmp_path)


@pytest.mark.parametrize(
    ("changes", "keeps_a_copy"),
    [
        ({}, True),
        ({"training": {"bf16": True, "fsdp": True}}, False),
        ({"optimizer": {"name": "muon"}}, False),
    ],
)
def test_on_a_gpu_weights_are_bfloat16_where_the_optimizer_keeps_a_master_copy(
    changes, keeps_a_copy
):
    half = recipe(**{"training": {"bf16": True}, **changes})
    expected = torch.bfloat16 if keeps_a_copy else torch.float32
    assert automatic_dtype(half, deepspeed=False, on_gpu=True) == expected


def test_each_process_limits_its_own_gpu_and_a_run_on_a_cpu_warns(monkeypatch, caplog):
    limits, here = [], torch.device("cuda", 1)
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda *given: limits.append(given)
    )
    limit_gpu_memory(0.8, SimpleNamespace(device=here))
    limit_gpu_memory(None, SimpleNamespace(device=here))
    assert limits == [(0.8, here)] and not caplog.records
    limit_gpu_memory(0.8, SimpleNamespace(device=torch.device("cpu")))
    assert len(limits) == 1 and "safety.max_gpu_memory" in caplog.text


# --- the length of a run ---


@pytest.mark.parametrize(("tokens", "warned"), [(100, True), (10_000, False)])
def test_a_budget_far_below_one_step_is_a_warning(caplog, tokens, warned):
    short = recipe(budget={"tokens": tokens, "global_batch_tokens": 512})
    warn_of_rounding(short, run_length(short, 0))
    assert ("budget.tokens" in caplog.text) is warned


def test_the_same_global_batch_on_more_processes_needs_less_accumulation(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    length = run_length(recipe(), 0)
    assert (length.steps, length.rows_per_step, length.gradient_accumulation_steps) == (20, 8, 1)


def test_a_learned_micro_batch_is_for_its_number_of_processes_and_keeps_the_global_batch(
    tmp_path, monkeypatch
):
    remember_micro_batch(tmp_path, 2, 2)
    large = recipe(training={"per_device_train_batch_size": 4})
    alone = run_length(large, 0, tmp_path)
    assert (alone.micro_batch, alone.gradient_accumulation_steps) == (4, 2)
    monkeypatch.setenv("WORLD_SIZE", "2")
    together = run_length(large, 0, tmp_path)
    assert (together.micro_batch, together.gradient_accumulation_steps, together.rows_per_step) == (
        2,
        2,
        8,
    )


def test_a_learned_micro_batch_that_does_not_divide_the_recipes_is_not_used(tmp_path):
    remember_micro_batch(tmp_path, 1, 4)
    length = run_length(recipe(), 0, tmp_path)
    assert (length.micro_batch, length.gradient_accumulation_steps) == (2, 4)


def test_an_interval_below_1_is_a_share_of_the_steps():
    length = run_length(recipe(), 0)
    assert [length.steps_between(None, every) for every in (None, 3, 0.25, 0.26, 0.001)] == [
        None,
        3,
        5,
        6,
        1,
    ]


# --- processes that share rows ---


def sharing(parallelism, **sections):
    """A recipe whose attention keeps documents apart by their bounds."""
    training = {
        "per_device_train_batch_size": 2,
        "parallelism_config": parallelism,
        **sections.pop("training", {}),
    }
    model = {"path": "base", "attention": "varlen"}
    return recipe(
        **{
            "stage": "cpt",
            "model": model,
            "budget": {"tokens": 4096},
            "training": training,
            **sections,
        }
    )


def check(recipe, *, zero_stage=2, model_type="llama", processes=2):
    model = build_on_meta(AutoConfig.for_model(model_type, **TINY[model_type]))
    profile = {"zero_optimization": {"stage": zero_stage}}
    check_parallelism(recipe, profile, model, processes=processes, elsewhere=False)


def test_shared_rows_under_zero_are_accepted():
    check(sharing({"sp_size": 2}))
    check(sharing({"sp_size": 2}), processes=1)  # before it is started


@pytest.mark.parametrize(
    ("parallelism", "processes"),
    [
        ({"tp_size": 2}, 6),
        ({"cp_size": 2}, 6),
        ({"dp_shard_size": 2}, 6),
        ({"sp_size": 3}, 3),
        ({"sp_size": 4}, 6),
    ],
)
def test_sizes_that_were_not_compared_with_one_process_or_do_not_divide_are_refused(
    parallelism, processes
):
    with pytest.raises(RecipeError, match="parallelism_config"):
        check(sharing(parallelism), processes=processes)


@pytest.mark.parametrize("size", ["tp_size", "cp_size", "dp_shard_size"])
def test_two_parts_of_another_kind_than_shared_rows_are_refused(size):
    with pytest.raises(RecipeError, match=f"{size}` is not supported"):
        check(sharing({size: 2}), processes=6)


@pytest.mark.parametrize(
    ("sections", "named"),
    [
        ({"data": {"packing": "token_budget", "sources": [{"path": "a.jsonl"}]}}, "token_budget"),
        ({"model": {"path": "base", "attention": "sdpa"}}, "sdpa"),
        ({"training": {"torch_compile": True}}, "torch_compile"),
        ({"stage": "dpo"}, "dpo"),
    ],
)
def test_sections_that_would_train_something_else_on_shared_rows_are_refused(sections, named):
    with pytest.raises(RecipeError, match=named):
        check(sharing({"sp_size": 2}, **sections))


@pytest.mark.parametrize(
    ("options", "named"), [({"zero_stage": 0}, "ZeRO"), ({"model_type": "deepseek_v3"}, "deep")]
)
def test_rows_are_shared_only_under_zero_and_by_models_that_were_compared(options, named):
    with pytest.raises(RecipeError, match=named):
        check(sharing({"sp_size": 2}), **options)


def test_a_step_has_the_rows_of_groups(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    config = parallelism_config({"parallelism_config": {"sp_size": 2}})
    assert (config.sp_size, config.data_parallel_size, config.non_data_parallel_size) == (2, 4, 2)
    length = run_length(sharing({"sp_size": 2}), 10_000)
    assert (length.rows_per_step, length.tokens_per_step) == (2 * 4, 2 * 4 * 64)
    assert parallelism_config({}) is None


# --- prompts of a step ---


def prompts_of(plan, world_size, step, left_out=()):
    """The prompts that a step's micro-batches belong to, once each."""
    rows = PromptRows(
        [{"prompt": number} for number in range(100)], plan, world_size, list(left_out)
    )
    items = range(
        step * plan.accumulation * world_size, (step + 1) * plan.accumulation * world_size
    )
    return list(dict.fromkeys(prompt["prompt"] for item in items for prompt in rows[item]))


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        (Generations(prompts=4, micro_batches=2, accumulation=2), [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (
            Generations(prompts=4, micro_batches=4, accumulation=2),
            [[0, 1, 2, 3], [0, 1, 2, 3], [4, 5, 6, 7]],
        ),
        (Generations(prompts=2, micro_batches=1, accumulation=2), [[0, 1, 2, 3], [4, 5, 6, 7]]),
    ],
    ids=["one step each", "two steps each", "two in a step"],
)
def test_a_step_has_the_same_prompts_whatever_the_number_of_processes(plan, expected):
    for step, prompts in enumerate(expected):
        assert prompts_of(plan, 1, step) == prompts_of(plan, 3, step) == prompts


def test_prompts_that_are_left_out_are_read_by_no_process():
    plan = Generations(prompts=4, micro_batches=2, accumulation=2)
    later = [shift_past_skipped(row, [(4, 8)]) for row in range(4, 8)]
    assert prompts_of(plan, 2, 1, left_out=[(4, 8)]) == later == [8, 9, 10, 11]


def rewarded(stage="grpo", global_batch=None, evaluation=None, **training):
    return recipe(
        stage=stage,
        rewards=["exact_match"],
        budget={"tokens": 10_000, "global_batch_tokens": global_batch},
        evaluation=evaluation or {},
        training={"per_device_train_batch_size": 8, "use_cpu": True, **training},
    )


def test_the_number_of_prompts_of_a_step_follows_from_the_recipe():
    assert prompts_of_step(rewarded(), 64) == 8
    assert prompts_of_step(rewarded(num_generations=4, num_iterations=2), 64) == 8
    assert prompts_of_step(rewarded("ppo"), 12) == 3


def is_taken_by_trl(training, processes, monkeypatch):
    monkeypatch.setattr(trl.GRPOConfig, "world_size", processes)
    try:
        trl.GRPOConfig(output_dir="x", report_to="none", bf16=False, **training)
    except ValueError:
        return False
    return True


SIZES = [
    {"per_device_train_batch_size": rows, "gradient_accumulation_steps": steps, **more}
    for rows in (1, 4, 6)
    for steps in (1, 3, 4)
    for more in (
        {"num_generations": 4},
        {"num_generations": 3, "num_iterations": 2},
        {"num_generations": 4, "steps_per_generation": 2},
        {"num_generations": 4, "steps_per_generation": 8},
        {"num_generations": 2, "generation_batch_size": 24},
        {"num_generations": 6, "generation_batch_size": 30},
    )
]


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_sizes_without_whole_groups_are_refused_as_by_trl_with_sizes_that_work(
    processes, monkeypatch
):
    refused = 0
    for sizes in SIZES:
        training, problem = sizes, ""
        for _ in range(3):  # a remedy for the groups of a step, another for those of a generation
            try:
                check_generations(rewarded(**training), processes)
                break
            except RecipeError as found:
                problem = str(found)
            key, value = re.findall(r"Write `training\.(\w+): (\d+)`", problem)[0]
            training = {**training, key: int(value)}
        refused += bool(problem)
        check_generations(rewarded(**training), processes)
        assert is_taken_by_trl({"use_cpu": True, **training}, processes, monkeypatch), training
        if not is_taken_by_trl({"use_cpu": True, **sizes}, processes, monkeypatch):
            assert problem, sizes
    assert 0 < refused < len(SIZES)


def test_another_number_of_answers_that_a_refusal_names_works():
    with pytest.raises(RecipeError, match=r"multiple of num_generations 8") as found:
        check_generations(rewarded(per_device_train_batch_size=6), 2)
    answers = int(re.findall(r"num_generations: (\d+)", str(found.value))[0])
    check_generations(rewarded(per_device_train_batch_size=6, num_generations=answers), 2)


def test_a_global_batch_without_whole_groups_is_refused_with_one_that_has_them():
    with pytest.raises(RecipeError) as found:
        check_generations(rewarded(global_batch=64 * 12, per_device_train_batch_size=2), 1)
    tokens = int(re.findall(r"global_batch_tokens: (\d+)", str(found.value))[0])
    check_generations(rewarded(global_batch=tokens, per_device_train_batch_size=2), 1)


@pytest.mark.parametrize(
    ("training", "named"),
    [
        ({"num_generations": 1}, "at least 2"),
        ({"steps_per_generation": 1, "generation_batch_size": 8}, "Remove one"),
        ({"per_device_eval_batch_size": 6}, "`training.per_device_eval_batch_size: 8`"),
        ({"num_generations_eval": 3}, "`training.per_device_eval_batch_size: 9`"),
    ],
)
def test_other_sizes_of_groups_that_trl_would_stop_at_are_refused(training, named):
    with pytest.raises(RecipeError, match=re.escape(named)):
        check_generations(rewarded(evaluation={"held_out_share": 0.1}, **training), 1)


def test_a_key_that_cpt_does_not_pass_on_is_refused_before_the_others_are_read(tmp_path):
    with pytest.raises(RecipeError, match="training.save_total_limit"):
        arguments(recipe(training={"use_cpu": True, "save_total_limit": 3}), tmp_path)


@pytest.mark.parametrize(
    ("epochs", "most", "steps"), [(1.5, None, 19), (1.5, 1.5, 18), (2.0, 1.5, 25), (0.01, None, 1)]
)
def test_epochs_are_whole_steps_rounded_up_unless_a_source_may_not_be_read_further(
    epochs, most, steps
):
    source = {"path": "a.txt"} | ({} if most is None else {"max_epochs": most})
    of_epochs = recipe(
        data={"sequence_length": 64, "sources": [source]},
        budget={"epochs": epochs, "global_batch_tokens": 512},
    )
    length = run_length(of_epochs, 100)
    assert (length.steps, length.rows_per_step, length.tokens_per_step) == (steps, 8, 512)
    assert (length.rows, length.tokens) == (8 * steps, 512 * steps)


@pytest.mark.heavy
@pytest.mark.parametrize("rank", [0, 1])
def test_a_profile_of_deepspeed_measures_no_throughput_and_its_changes_are_reported(
    rank, tmp_path, monkeypatch, caplog
):
    monkeypatch.setenv("RANK", str(rank))
    profile = {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}, "wandb": {}}
    made = training_arguments(
        recipe(training={"per_device_train_batch_size": 2, "use_cpu": True, "bf16": True}),
        tmp_path,
        SimpleNamespace(form="document", num_rows=100, held_out=()),
        deepspeed=profile,
    )
    config = made.hf_deepspeed_config.config
    assert config["timers"] == {"throughput": {"enabled": False}}
    assert config["zero_optimization"]["stage"] == 2
    changes = [text for text in caplog.messages if text.startswith("`training.deepspeed` is used")]
    assert len(changes) == (1 if rank == 0 else 0)
