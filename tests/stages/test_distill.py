import json

import pytest
import torch
from tiny import write_recipe
from tiny_models import tiny_config
from tiny_teachers import save_teacher, student_trainer, texts_of

from cpt.data.rows.packing import IGNORED
from cpt.errors import RecipeError
from cpt.recipe.load import load_recipe


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


@pytest.mark.parametrize(
    ("training", "said"),
    [
        ({"beta": 2.0}, "`training`: DistillConfig says: beta must be from 0 to 1, got 2.0"),
        ({"temperature": 0.0}, "`training.temperature`"),
        (
            {"teacher_model_name_or_path": None},
            "`distill_text` needs a teacher",
        ),
    ],
)
def test_what_cannot_be_distilled_is_refused(recipe_of, training, said):
    with pytest.raises(RecipeError, match=said):
        student_trainer(recipe_of(**training))
