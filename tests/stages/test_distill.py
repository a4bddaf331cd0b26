import json

import pytest
import torch
from tiny import write_recipe
from tiny_models import tiny_config
from tiny_teachers import mean_kl, save_teacher, student_trainer, texts_of
from transformers import AutoModelForCausalLM

from cpt.data.rows.rows import IGNORED
from cpt.errors import RecipeError
from cpt.recipe.load import load_recipe
from cpt.recipe.references import REPOSITORY
from cpt.stages.distill import COLUMNS
from cpt.stages.distill_text import COLUMNS as TEXT_COLUMNS
from cpt.train import train


@pytest.fixture(scope="module")
def teacher_folder(corpus, tokenizer_folder, tmp_path_factory):
    """Wider than its student."""
    return save_teacher(tmp_path_factory.mktemp("teacher") / "t", tokenizer_folder, texts_of(corpus), hidden_size=48)


@pytest.fixture
def recipe_of(tiny_recipe, tmp_path, teacher_folder):
    """A student of the teacher."""

    def load(*overrides, steps=8, **training):
        budget = {"tokens": steps * 512, "global_batch_tokens": 512}
        settings = {
            "per_device_train_batch_size": 8,
            "logging_steps": 1,
            "teacher_model_name_or_path": str(teacher_folder),
        } | training
        sections = {
            **tiny_recipe,
            "stage": "distill_text",
            "optimizer": {"learning_rate": 1e-2},
            "budget": budget,
            "training": settings,
        }
        return load_recipe(write_recipe(sections, tmp_path / "r.yaml"), overrides)

    return load


def batch_of(trainer, rows=8):
    return {name: torch.stack([trainer.rows[row][name] for row in range(rows)]) for name in trainer.rows[0]}


@pytest.mark.slow
def test_the_divergence_from_the_teacher_falls_by_10(recipe_of, teacher_folder):
    trainer = student_trainer(recipe_of(steps=120))
    teacher, ids = AutoModelForCausalLM.from_pretrained(teacher_folder), batch_of(trainer)["input_ids"]
    before = mean_kl(teacher, trainer.model, ids)
    weights = {name: value.clone() for name, value in trainer.teacher.state_dict().items()}
    trainer.train()
    assert mean_kl(teacher, trainer.model, ids) < before / 10
    assert all(value.equal(weights[name]) for name, value in trainer.teacher.state_dict().items()), (
        "the teacher learns nothing"
    )
    assert not any(parameter.requires_grad for parameter in trainer.teacher.parameters())


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_loss_and_gradients_of_a_batch_are_those_of_a_hand_written_one(recipe_of, beta):
    trainer = student_trainer(recipe_of(beta=beta))
    batch = batch_of(trainer)
    batch["labels"][:, :20] = IGNORED
    count = int((batch["labels"][:, 1:] != IGNORED).sum())
    trainer.compute_loss(trainer.model.train(), dict(batch), num_items_in_batch=torch.tensor(count)).backward()
    found = {name: parameter.grad.clone() for name, parameter in trainer.model.named_parameters()}
    trainer.model.zero_grad()

    where = {name: batch[name] for name in ("input_ids", "position_ids")}
    q = torch.softmax(trainer.model(**where).logits[:, :-1], -1)
    p = torch.softmax(trainer.teacher(**where).logits[:, :-1], -1).detach()
    mixture = beta * p + (1 - beta) * q
    terms = {
        0.0: p * (p / q).log(),
        0.5: beta * p * (p / mixture).log() + (1 - beta) * q * (q / mixture).log(),
        1.0: q * (q / p).log(),
    }
    (terms[beta].sum(-1)[batch["labels"][:, 1:] != IGNORED].sum() / count).backward()
    for name, parameter in trainer.model.named_parameters():
        assert torch.allclose(found[name], parameter.grad, atol=1e-6), name


def test_packed_documents_learn_what_they_would_learn_alone(recipe_of):
    trainer = student_trainer(recipe_of())
    row = next(row for row in map(trainer.rows.__getitem__, range(20)) if int((row["position_ids"] == 0).sum()) > 1)
    one_row = {name: value.unsqueeze(0) for name, value in row.items()}
    counted = torch.tensor(1.0)  # sums, which can be added up
    together = trainer.compute_loss(trainer.model.train(), one_row, num_items_in_batch=counted)
    starts = [*(row["position_ids"] == 0).nonzero().flatten().tolist(), len(row["position_ids"])]
    alone = [
        trainer.compute_loss(
            trainer.model, {name: value[:, first:last] for name, value in one_row.items()}, num_items_in_batch=counted
        )
        for first, last in zip(starts, starts[1:], strict=False)
    ]
    assert together.item() == pytest.approx(sum(alone).item(), rel=1e-5)


def test_experts_are_balanced_as_elsewhere(recipe_of):
    """The auxiliary loss of the student is added as its own loss has it; the teacher's is nobody's."""
    shape = {**tiny_config("qwen3_moe"), "vocab_size": 320, "router_aux_loss_coef": 0.5, "output_router_logits": True}
    trainer = student_trainer(recipe_of(f"model.config={json.dumps(shape)}"))
    trainer.current_gradient_accumulation_steps = 2  # as the Trainer sets it for each step
    batch, weight = batch_of(trainer), 0.5
    count = torch.tensor(int((batch["labels"][:, 1:] != IGNORED).sum()))
    loss, outputs = trainer.compute_loss(
        trainer.model.train(), dict(batch), return_outputs=True, num_items_in_batch=count
    )
    trainer.model.config.router_aux_loss_coef = 0.0
    bare = trainer.compute_loss(trainer.model, dict(batch), num_items_in_batch=count)
    share = weight * outputs["aux_loss"] / trainer.current_gradient_accumulation_steps
    assert outputs["aux_loss"] > 0 and (loss - bare).item() == pytest.approx(share.item(), rel=1e-4)


@pytest.mark.slow
def test_accumulated_steps_are_one_large_one(recipe_of):
    whole = student_trainer(recipe_of(steps=3))
    whole.train()
    parts = student_trainer(recipe_of("name=parts", steps=3, per_device_train_batch_size=2))
    parts.train()
    for name, parameter in whole.model.named_parameters():
        assert torch.allclose(parameter, parts.model.get_parameter(name), atol=1e-4), name


def test_conversations_and_texts_have_a_stage_each():
    assert (COLUMNS, TEXT_COLUMNS) == (("messages",), ("text",))


@pytest.mark.parametrize(
    ("training", "said"),
    [
        ({"beta": 2.0}, "`training`: DistillConfig says: beta must be from 0 to 1, got 2.0"),
        ({"temperature": 0.0}, "`training.temperature`"),
        (
            {"teacher_model_name_or_path": None},
            "stage `distill_text` learns from another model: give `training.teacher_model_name_or_path`",
        ),
    ],
)
def test_what_cannot_be_distilled_is_refused(recipe_of, training, said):
    with pytest.raises(RecipeError, match=said):
        student_trainer(recipe_of(**training))


@pytest.mark.slow
def test_a_run_that_goes_on_is_the_uninterrupted_one(recipe_of):
    straight = student_trainer(recipe_of("checkpoints.every_steps=3", steps=6))
    straight.train()
    again = student_trainer(recipe_of("checkpoints.every_steps=3", steps=6))
    again.train(resume_from_checkpoint=straight.run_folder / "checkpoint-3")
    assert all(value.equal(again.model.state_dict()[name]) for name, value in straight.model.state_dict().items())


@pytest.mark.long
def test_an_adapter_learns_from_a_finished_run_on_conversations(tmp_path, monkeypatch):
    """Through the command's own function: teacher and student are runs, the student an adapter on another run."""
    monkeypatch.chdir(REPOSITORY)
    here = [f"output_dir={tmp_path}/runs"]
    train(load_recipe("recipes/tiny/sft.yaml", [*here, "name=teacher", "budget.tokens=61_440"]))
    train(load_recipe("recipes/tiny/sft.yaml", [*here, "name=base", "budget.tokens=10_240", "seed=7"]))
    teacher = f"training.teacher_model_name_or_path={tmp_path}/runs/teacher"
    start = ["model.from_scratch=false", "model.config=null", f"model.path={tmp_path}/runs/base", "model.lora=cpt"]
    recipe = load_recipe(
        "recipes/tiny/sft.yaml", [*here, "name=student", "stage=distill", *start, teacher, "budget.tokens=81_920"]
    )
    final = train(recipe)
    logged = [json.loads(line) for line in (final.parent / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in logged if "loss" in line]
    assert losses[-1] < losses[0] / 2 and (final / "config.json").exists() and (final / "adapter").is_dir()
