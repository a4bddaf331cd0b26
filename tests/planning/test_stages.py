"""What stages hold besides the model, and what their real steps take on the CPU."""

from dataclasses import fields
from pathlib import Path

import pytest
from planned_setups import FACTS
from stage_steps import SHAPE, measured_peak, recipe_of
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from cpt.errors import RecipeError
from cpt.models.config import config_from
from cpt.planning.activations import count_activations
from cpt.planning.memory import plan_memory, sizes_for_stage
from cpt.planning.model_sizes import KINDS, LMBDA, SCORE, StageNeeds, read_stage_needs, sizes_of_model, with_own_head
from cpt.planning.workload import read_setup
from cpt.recipe.huggingface_keys import STAGE_CONFIGS
from cpt.recipe.schema import Reward
from cpt.training.arguments import find_stage

OWN = ("pretrain", "cpt", "sft")  # a language model's own loss, and nothing besides


def test_every_stage_is_known():
    assert {*KINDS, *OWN} == {*STAGE_CONFIGS}


@pytest.mark.parametrize(
    "stage", [name for name, kind in KINDS.items() if kind.beta is not None or kind.written is not None]
)
def test_defaults_are_those_of_the_config_class(stage):
    kind = KINDS[stage]
    defaults = {field.name: field.default for field in fields(find_stage(stage).CONFIG)}
    assert kind.beta is None or defaults["beta"] == kind.beta
    assert kind.written is None or defaults[kind.written[0]] == kind.written[1]
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
def test_what_a_stage_has_besides(stage, training, reference, sequences, completion, tmp_path):
    found = read_stage_needs(recipe_of(stage, tmp_path, **training))
    assert (found.reference, found.sequences, found.completion) == (reference, sequences, completion)


def saved(folder: Path, kind: type = AutoModelForCausalLM, **changes) -> str:
    kind.from_config(config_from({**SHAPE, "hidden_size": 32, "intermediate_size": 48, **changes})).save_pretrained(
        folder
    )
    return str(folder)


def test_a_teacher_is_counted_from_its_config(tmp_path):
    path = saved(tmp_path / "teacher")
    config = config_from({**SHAPE, "hidden_size": 32, "intermediate_size": 48})
    for training, each in (({}, 4), ({"bf16": True}, 2)):
        teacher = read_stage_needs(recipe_of("distill", tmp_path, teacher_model_name_or_path=path, **training)).teacher
        assert (
            teacher is not None
            and teacher.weights_bytes == each
            and teacher.parameters == sizes_of_model(config, None, 1).parameters
        )
    with pytest.raises(RecipeError, match="teacher_model_name_or_path` is missing"):
        read_stage_needs(recipe_of("distill", tmp_path))


def test_reward_models_are_counted_without_a_language_models_head_or_named_where_they_cannot_be(tmp_path):
    path = saved(tmp_path / "judge", AutoModelForSequenceClassification)
    recipe = recipe_of("grpo", tmp_path)
    (judge,) = read_stage_needs(recipe.model_copy(update={"rewards": [Reward(name="reward_model", path=path)]})).judges
    real = AutoModelForSequenceClassification.from_pretrained(path)
    assert (
        judge.parameters == pytest.approx(sum(p.numel() for p in real.parameters()), rel=0.001)
        and judge.weights_bytes == 4
    )
    found = read_stage_needs(
        recipe.model_copy(update={"rewards": [Reward(name="reward_model", path=str(tmp_path / "nowhere"))]})
    )
    assert found.judges == () and "the reward model" in found.uncounted[0]


def test_one_score_takes_the_place_of_the_head_and_values_come_beside_it():
    score = with_own_head(FACTS, StageNeeds("reward", logits=SCORE), adapters=False)
    assert (score.parameters, score.trained, score.head, score.vocabulary) == (902, 902, 2, 1)
    assert with_own_head(FACTS, StageNeeds("ppo"), adapters=False).trained == 1003
    assert with_own_head(FACTS, StageNeeds("dpo"), adapters=False) is FACTS


def planned_and_measured(stage, folder, **options):
    """Bytes of one process."""
    if stage in ("distill", "gkd", "distill_on_policy"):
        AutoModelForCausalLM.from_config(
            config_from({**SHAPE, "hidden_size": 512, "num_attention_heads": 8})
        ).save_pretrained(folder / "t")
        options["teacher_model_name_or_path"] = str(folder / "t")
    recipe = recipe_of(stage, folder, **options)
    config = config_from(recipe.model.config)
    setup = read_setup(recipe, 1, None, attention="sdpa", on_cpu=True)
    return plan_memory(
        sizes_for_stage(config, setup), setup, count_activations(config, setup)
    ).model_alone, measured_peak(recipe)


SAMPLES_MUCH = {
    "shape": {**SHAPE, "vocab_size": 128},
    "gradient_accumulation_steps": 32,
    "per_device_train_batch_size": 1,
}
SLOW = ("kto", "ppo", "distill")
CASES = [
    ("dpo", {}),
    ("dpo", {"lora": {"r": 8}}),
    ("reward", {}),
    ("grpo", {"beta": 0.1, "max_completion_length": 4}),
]
MORE = [
    ("dpo", {"gradient_checkpointing": True}),
    ("kto", {}),
    ("orpo", {}),
    ("rloo", {}),
    ("ppo", {"gradient_accumulation_steps": 4}),
    ("distill", {}),
    ("distill_on_policy", {}),
    ("gkd", {"lmbda": 1.0}),
    ("grpo", {**SAMPLES_MUCH, "max_completion_length": 4, "bf16": True}),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "options"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.slow if case[0] in SLOW else pytest.mark.long) for case in MORE)],
    ids=[" ".join((stage, *(key for key in options if key != "shape"))) for stage, options in (*CASES, *MORE)],
)
def test_a_plan_is_what_real_steps_take(stage, options, tmp_path):
    planned, measured = planned_and_measured(stage, tmp_path, **options)
    # The first pass through prompts is counted by the longest of its layers' operations, so that sampling may be less.
    assert 0.97 <= planned / measured <= (1.15 if "shape" in options else 1.07)
