"""What stages hold besides the model, and what their real steps take on the CPU."""

from dataclasses import fields

import pytest
from planned_setups import FACTS
from stage_steps import SHAPE, measured_peak, recipe_of
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from benchmarks.plan.dry_run import planned_bytes
from cpt.errors import RecipeError
from cpt.models.config import config_from
from cpt.planning.model_sizes import (
    KINDS,
    LMBDA,
    SCORE,
    StageNeeds,
    read_stage_needs,
    sizes_of_model,
    with_own_head,
)
from cpt.planning.workload import read_setup
from cpt.recipe.huggingface_keys import STAGE_CONFIGS, find_stage
from cpt.recipe.schema import Reward


def test_every_stage_is_known():
    of_a_language_model = ("pretrain", "cpt", "sft")
    assert {*KINDS, *of_a_language_model} == {*STAGE_CONFIGS}


@pytest.mark.parametrize(
    "stage",
    [
        name
        for name, kind in KINDS.items()
        if kind.beta is not None or kind.completion_limit is not None
    ],
)
def test_defaults_are_those_of_the_config_class(stage):
    kind = KINDS[stage]
    defaults = {field.name: field.default for field in fields(find_stage(stage).CONFIG)}
    assert kind.beta is None or defaults["beta"] == kind.beta
    assert (
        kind.completion_limit is None
        or defaults[kind.completion_limit[0]] == kind.completion_limit[1]
    )
    assert stage != "gkd" or defaults["lmbda"] == LMBDA


@pytest.mark.parametrize(
    ("stage", "training", "reference", "sequences", "completion"),
    [
        ("dpo", {}, True, 2, 0),
        ("kto", {}, True, 1, 0),
        ("orpo", {}, False, 2, 0),
        ("grpo", {}, False, 1, 32),
        ("grpo", {"beta": 0.04}, True, 1, 32),
        ("rloo", {}, True, 1, 32),
        ("rloo", {"beta": 0.0}, False, 1, 32),
    ],
)
def test_a_stage_holds_models_and_rows_besides(
    stage, training, reference, sequences, completion, tmp_path
):
    found = read_stage_needs(recipe_of(stage, tmp_path, **training))
    assert (found.reference, found.sequences, found.completion) == (
        reference,
        sequences,
        completion,
    )


NARROW = {**SHAPE, "hidden_size": 32, "intermediate_size": 48}


def test_a_teacher_is_counted_from_its_config(tmp_path):
    AutoModelForCausalLM.from_config(config_from(NARROW)).save_pretrained(tmp_path / "teacher")
    parameters = sizes_of_model(config_from(NARROW), None, 1).parameters
    for training, each in (({}, 4), ({"bf16": True}, 2)):
        recipe = recipe_of(
            "distill", tmp_path, teacher_model_name_or_path=str(tmp_path / "teacher"), **training
        )
        teacher = read_stage_needs(recipe).teacher
        assert teacher is not None and (teacher.weights_bytes, teacher.parameters) == (
            each,
            parameters,
        )
    with pytest.raises(RecipeError, match="teacher_model_name_or_path"):
        read_stage_needs(recipe_of("distill", tmp_path))


def test_reward_models_are_counted_without_a_language_models_head(tmp_path):
    real = AutoModelForSequenceClassification.from_config(config_from(NARROW))
    real.save_pretrained(tmp_path / "judge")

    def needs_with(path):
        rewards = [Reward(name="reward_model", path=str(path))]
        return read_stage_needs(recipe_of("grpo", tmp_path).model_copy(update={"rewards": rewards}))

    (judge,) = needs_with(tmp_path / "judge").reward_models
    assert (
        judge.parameters == pytest.approx(real.num_parameters(), rel=0.001)
        and judge.weights_bytes == 4
    )
    unknown = needs_with(tmp_path / "nowhere")
    assert unknown.reward_models == () and "reward model" in unknown.uncounted[0]


def test_a_score_replaces_the_head_and_a_value_head_is_added():
    score = with_own_head(FACTS, StageNeeds("reward", logits=SCORE), adapters=False)
    assert (score.parameters, score.trained, score.head, score.vocabulary) == (902, 902, 2, 1)
    assert with_own_head(FACTS, StageNeeds("ppo"), adapters=False).trained == 1003
    assert with_own_head(FACTS, StageNeeds("dpo"), adapters=False) is FACTS


def planned_and_measured(stage, folder, **options):
    """Bytes of one process."""
    if stage == "distill":
        teacher = config_from({**SHAPE, "hidden_size": 512, "num_attention_heads": 8})
        AutoModelForCausalLM.from_config(teacher).save_pretrained(folder / "teacher")
        options["teacher_model_name_or_path"] = str(folder / "teacher")
    recipe = recipe_of(stage, folder, **options)
    config = config_from(recipe.model.config)
    setup = read_setup(recipe, 1, None, attention="sdpa", on_cpu=True)
    return planned_bytes(config, setup), measured_peak(recipe)


CASES = [
    ("dpo", {"lora": {"r": 8}}),
    ("kto", {}),
    ("reward", {}),
    ("grpo", {"beta": 0.1, "max_completion_length": 4}),
    ("ppo", {"gradient_accumulation_steps": 4}),
    ("distill", {}),
    ("cpt", {"replay_kl": 0.5}),
    ("cpt", {"replay_kl": 0.5, "lora": {"r": 8}, "bf16": True}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "options"), CASES)
def test_a_plan_is_what_real_steps_take(stage, options, tmp_path):
    planned, measured = planned_and_measured(stage, tmp_path, **options)
    assert 0.97 <= planned / measured <= 1.07
