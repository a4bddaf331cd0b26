"""The trainer, the models and the teacher of a stage."""

import json
import shutil

import pytest
import torch
from example_runs import build_run
from tiny import TINY_LLAMA
from tiny_checkpoints import save_llama
from tiny_models import make_tokenizer
from tiny_trainers import trainer_of
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from transformers.integrations import INTEGRATION_TO_CALLBACK
from transformers.trainer_callback import PrinterCallback

from cpt.contrib.distillation.distill import DistillConfig
from cpt.errors import RecipeError
from cpt.recipe.huggingface_keys import find_stage
from cpt.recipe.load import REPOSITORY, load_recipe
from cpt.recipe.schema import Model, Recipe
from cpt.runs.events import read_events
from cpt.stages import models
from cpt.stages.models import (
    build_teacher,
    check_reference,
    ends_of_answers,
    model_for,
    reference_model,
)
from cpt.training.arguments import training_arguments
from cpt.training.trainer import CPTTrainer

STAGE = """
from transformers import Trainer, TrainingArguments as CONFIG
from cpt.training.trainer import CPTTrainer

COLUMNS = ("text",)

class Mine(CPTTrainer):
    pass

def build_trainer(recipe, model, tokenizer, data, arguments, length):
"""
MINE = "    return Mine(recipe, model, arguments, rows=data.rows, length=length, tokenizer=tokenizer)\n"
ANOTHER = "    return Trainer(model, arguments, train_dataset=data.rows)\n"


@pytest.fixture
def masks(monkeypatch):
    """Whether batches of the trainers that are built have masks, as they tell the attention."""
    told = []
    monkeypatch.setattr(
        "cpt.training.trainer.leave_out_cudnn", lambda *, has_masks: told.append(has_masks)
    )
    return told


@pytest.fixture
def lab(tmp_path, monkeypatch):
    """A folder of the user's own stages."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lab_of_stages").mkdir()
    return tmp_path / "lab_of_stages"


def test_a_users_stage_brings_its_own_trainer(tiny_recipe, tmp_path, lab):
    (lab / "mine.py").write_text(STAGE + MINE)
    trainer = trainer_of(tiny_recipe, tmp_path, stage="lab_of_stages.mine")
    assert type(trainer).__name__ == "Mine" and isinstance(trainer, CPTTrainer)


def test_a_users_stage_with_another_trainer_is_refused(tiny_recipe, tmp_path, lab):
    (lab / "another.py").write_text(STAGE + ANOTHER)
    with pytest.raises(RecipeError, match=r"`stage`: lab_of_stages.another .*CPTTrainer"):
        trainer_of(tiny_recipe, tmp_path, stage="lab_of_stages.another")


def test_a_users_stage_that_lacks_a_part_is_refused(lab):
    (lab / "half.py").write_text("CONFIG = COLUMNS = ()\n")
    with pytest.raises(RecipeError, match="lacks build_trainer"):
        find_stage("lab_of_stages.half")


@pytest.mark.parametrize(
    ("model", "frozen"), [({}, set()), ({"lora": {}}, {torch.bfloat16})], ids=["all", "adapter"]
)
def test_in_half_precision_frozen_weights_are_half_and_trained_ones_are_not(
    model, frozen, tiny_recipe, tmp_path
):
    base = save_llama(tmp_path / "base", tiny_recipe["tokenizer"]["path"], 1)
    training = {**tiny_recipe["training"], "bf16": True}
    recipe = Recipe.model_validate(
        {**tiny_recipe, "stage": "cpt", "model": {"path": str(base), **model}, "training": training}
    )
    data = type("Data", (), {"num_rows": 100, "held_out": {}, "form": "document"})
    tokenizer = AutoTokenizer.from_pretrained(base)
    weights = [
        *model_for(recipe, tokenizer, training_arguments(recipe, tmp_path, data)).parameters()
    ]
    assert {weight.dtype for weight in weights if weight.requires_grad} == {torch.float32}
    assert {weight.dtype for weight in weights if not weight.requires_grad} == frozen


def test_the_reference_has_the_weights_of_the_start_and_is_frozen(tmp_path):
    trainer = build_run("dpo", tmp_path)
    again = reference_model(trainer.recipe, make_tokenizer(), trainer.args)
    trained = model_for(trainer.recipe, make_tokenizer(), trainer.args)
    assert all(
        torch.equal(one, other)
        for one, other in zip(again.parameters(), trained.parameters(), strict=True)
    )
    assert not again.training and not any(
        parameter.requires_grad for parameter in again.parameters()
    )


WATCHERS = """
    TrainingClock SmoothedLoss RealisedShares SourceLosses ModelFlopsUtilization MachineUse
    {} MetricsFile StatusFile ConsoleProgress {}
"""


def test_callbacks_are_those_of_the_recipe_in_the_order_in_which_they_need_each_other(
    tiny_recipe, tmp_path, corpus
):
    sets = [{"path": str(corpus / "held_out.jsonl"), "name": name} for name in ("kept", "mine")]
    evaluation = {
        "perplexity": sets,
        "every_tokens": 512,
        "retain": {"kept": 0.1},
        "stop": {"set": "mine", "patience": 3},
        "prompts": ["the model"],
        "tasks": ["exam"],
        "tasks_every_tokens": 512,
    }
    monitoring = {"profile": 2, "callbacks": [{"name": "cost", "dollars_per_gpu_hour": 2.5}]}
    all_of_it = {"evaluation": evaluation, "monitoring": monitoring}
    usual = ["EndsAtEvaluationPoint", "DefaultFlowCallback", "DataPosition"]
    added = "StopWhenForgetting StopEarly PromptSamples"
    for sections, more, last in (
        ({}, ("", ""), ""),
        (all_of_it, ("Cost", "TaskEvaluations StepProfile"), added),
    ):
        watcher = PrinterCallback()
        trainer = trainer_of(tiny_recipe, tmp_path, callbacks=[watcher], **sections)
        handler = trainer.callback_handler
        names = [type(one).__name__ for one in handler.callbacks]
        watching = WATCHERS.format(*more).split()
        assert names == [*usual, *watching, "PrinterCallback", *last.split(), "CheckedStep"]
        assert watcher in handler.callbacks, "TRL's own was removed"


def test_trackers_of_hugging_face_cannot_end_the_run(tiny_recipe, tmp_path, monkeypatch):
    class Broken(TrainerCallback):
        def on_step_begin(self, *arguments, **options):
            raise OSError("the server is gone")

    monkeypatch.setitem(INTEGRATION_TO_CALLBACK, "tensorboard", Broken)
    monitoring = {"trackers": ["tensorboard"]}
    trainer = trainer_of(tiny_recipe, tmp_path, steps=1, monitoring=monitoring)
    trainer.train()
    assert [event["kind"] for event in read_events(trainer.run_folder)] == ["tracker_failed"]


def test_one_source_and_rows_of_examples_have_no_losses_of_sources(tiny_recipe, tmp_path):
    tiny_recipe["data"]["sources"] = tiny_recipe["data"]["sources"][:1]
    trainer = trainer_of(tiny_recipe, tmp_path)
    assert "SourceLosses" not in [type(one).__name__ for one in trainer.callback_handler.callbacks]


# --- ends of answers ---


def recipe_of(stage, **sections):
    given = {
        "name": "run",
        "output_dir": "runs",
        "stage": stage,
        "model": {"path": "base"},
        "data": {"sources": [{"path": "a.jsonl"}]},
        "budget": {"tokens": 1000},
    }
    return Recipe.model_validate(given | sections)


@pytest.mark.parametrize(
    ("known", "ends"), [(None, [2, 7]), (2, [2, 7]), (5, [5, 2, 7]), ([5, 7, None], [5, 7, 2])]
)
def test_a_model_that_learns_chats_ends_after_its_turn_and_at_eos_too(known, ends):
    tokenizer = make_tokenizer()
    chats = [
        recipe_of("sft"),
        recipe_of("dpo"),
        recipe_of("cpt", data={"sources": [{"path": "a"}, {"path": "b", "chat": "messages"}]}),
    ]
    assert all(ends_of_answers(known, tokenizer, recipe) == known for recipe in chats)
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message.role }} {{ message.content }} w7 {% endfor %}"
        "{% if add_generation_prompt %}assistant {% endif %}"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["w7"]})
    assert all(ends_of_answers(known, tokenizer, recipe) == ends for recipe in chats)
    assert ends_of_answers(known, tokenizer, recipe_of("cpt")) == known


# --- references ---

REPLAY = {"sources": [{"path": "a"}, {"path": "b", "replay_kl": 0.5}]}


@pytest.mark.parametrize(
    ("recipe", "start", "is_refused"),
    [
        (("dpo", {}), "pissa_niter_4", True),
        (("dpo", {}), True, False),
        (("kto", {}), "pissa", True),
        (("sft", {}), "pissa", False),
        (("cpt", {"data": REPLAY}), "pissa", True),
        (("grpo", {"training": {"beta": 0.1}}), "pissa", True),
        (("grpo", {"training": {"beta": 0.0}}), "pissa", False),
        (("grpo", {}), "pissa", False),
        (("rloo", {}), "pissa", True),  # its default is not 0
    ],
)
def test_an_adapter_that_changes_the_base_is_refused_where_the_base_is_a_reference(
    recipe, start, is_refused
):
    stage, sections = recipe
    rewards = {"rewards": ["exact_match"]} if stage in ("grpo", "rloo") else {}
    model = {"path": "base", "lora": {"r": 4, "init_lora_weights": start}}
    given = recipe_of(stage, model=model, **rewards, **sections)
    if is_refused:
        with pytest.raises(RecipeError, match="init_lora_weights"):
            check_reference(given)
    else:
        check_reference(given)


# --- teachers ---


@pytest.mark.parametrize("is_half", [False, True])
def test_a_teacher_is_built_as_the_recipe_says(
    is_half, teacher, tokenizer_folder, tmp_path, monkeypatch
):
    built, build = [], models.build_model
    monkeypatch.setattr(
        models,
        "build_model",
        lambda *given, **options: built.append((given, options)) or build(*given, **options),
    )
    options = {"teacher_model_revision": "0123abc", "bf16": is_half}
    teach(teacher, tokenizer_folder, tmp_path, **options)
    (((section, _), options),) = built
    assert section == Model(path=str(teacher), revision="0123abc", attention="eager")
    dtype = torch.bfloat16 if is_half else torch.float32
    assert options == {"dtype": dtype, "mixed_precision": is_half, "packed": True}


def test_a_teacher_needs_no_tokenizer_but_as_many_tokens(tokenizer_folder, tmp_path):
    small = save_llama(tmp_path / "small", tokenizer_folder, 1, vocab_size=321)
    with pytest.raises(RecipeError, match="has 321 tokens and the model 320"):
        teach(small, tokenizer_folder, tmp_path)
    bare = save_llama(tmp_path / "bare", tokenizer_folder, 1)
    (bare / "tokenizer.json").unlink()
    teach(bare, tokenizer_folder, tmp_path)
    with pytest.raises(RecipeError, match="`training.teacher_model_name_or_path` is missing"):
        teach(None, tokenizer_folder, tmp_path)


@pytest.fixture
def teacher(tokenizer_folder, tmp_path):
    return save_llama(tmp_path / "teacher", tokenizer_folder, 1)


def teach(path, tokenizer_folder, folder, **training):
    """Build the teacher in a folder for a student of the tiny shape."""
    recipe = load_recipe(
        REPOSITORY / "recipes" / "tiny" / "pretrain.yaml", ["model.attention=eager"]
    )
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    student = AutoModelForCausalLM.from_pretrained(
        save_llama(folder / "student", tokenizer_folder, 2)
    )
    named = None if path is None else str(path)
    arguments = DistillConfig(
        output_dir=str(folder), use_cpu=True, teacher_model_name_or_path=named, **training
    )
    return build_teacher(recipe, student, tokenizer, arguments)


def test_a_teacher_is_whole_frozen_and_in_evaluation_mode(teacher, tokenizer_folder, tmp_path):
    built = teach(teacher, tokenizer_folder, tmp_path)
    weights = AutoModelForCausalLM.from_pretrained(teacher).state_dict()
    assert all(value.equal(weights[name]) for name, value in built.state_dict().items())
    assert not built.training and not any(
        parameter.requires_grad for parameter in built.parameters()
    )
    assert {parameter.dtype for parameter in built.parameters()} == {torch.float32}


def test_a_run_is_a_teacher_once_it_is_finished(teacher, tokenizer_folder, tmp_path):
    run = tmp_path / "runs" / "big"
    shutil.copytree(teacher, run / "final")
    (run / "recipe.yaml").write_text("name: big\n")
    with pytest.raises(RecipeError, match="training.teacher_model_name_or_path"):
        teach(run, tokenizer_folder, tmp_path)
    (run / "status.json").write_text(json.dumps({"state": "finished"}))
    assert teach(run, tokenizer_folder, tmp_path).config.hidden_size == TINY_LLAMA["hidden_size"]


def test_a_teacher_of_the_same_number_of_other_tokens_is_refused(
    teacher, tokenizer_folder, tmp_path
):
    path = teacher / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    words = tokenizer["model"]["vocab"]
    words["a"], words["b"] = words["b"], words["a"]
    path.write_text(json.dumps(tokenizer))
    with pytest.raises(RecipeError, match="2 tokens have other ids"):
        teach(teacher, tokenizer_folder, tmp_path)


@pytest.mark.parametrize("stage", ["dpo", "kto", "orpo", "cpo", "reward"])
def test_batches_of_examples_have_masks(stage, tmp_path, masks):
    build_run(stage, tmp_path)
    assert masks == [True]


@pytest.mark.parametrize(
    ("attention", "packing", "has_masks"),
    [("varlen", "best_fit", False), ("sdpa", "best_fit", True), ("sdpa", "token_budget", True)],
)
def test_packed_rows_have_masks_unless_attention_uses_bounds(
    attention, packing, has_masks, tiny_recipe, tmp_path, masks
):
    tiny_recipe["model"]["attention"] = attention
    tiny_recipe["data"]["packing"] = packing
    tiny_recipe["training"]["per_device_train_batch_size"] = 1
    trainer_of(tiny_recipe, tmp_path)
    assert masks == [has_masks]
