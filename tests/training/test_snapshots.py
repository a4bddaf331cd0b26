"""What a snapshot holds is what the Trainer would write, whatever the next step does."""

import pytest
from save_both_ways import differing, in_background, save
from saved_runs import events, published, trainer_of
from tiny import TINY_LLAMA
from transformers import Trainer

from cpt.checkpoints.manifest import damages

EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "head_dim": 8,
    "model_type": "qwen3_moe",
}
GRID = ["plain", "lora", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("tied", "experts", "lora_cpt"))]


@pytest.mark.parametrize("kind", GRID)
def test_a_checkpoint_is_what_the_trainer_would_have_written(tiny_recipe, tmp_path, kind):
    shape = {"tied": {"tie_word_embeddings": True}, "experts": EXPERTS}.get(kind, {})
    tiny_recipe["model"]["config"] = {**TINY_LLAMA, **shape}
    if kind.startswith("lora"):
        base = trainer_of(tiny_recipe, tmp_path / "base")
        base.save_model(str(tmp_path / "model"))
        tiny_recipe["model"] = {"path": str(tmp_path / "model"), "lora": {} if kind == "lora" else "cpt"}
        tiny_recipe["stage"] = "cpt"
    trainer = trainer_of(tiny_recipe, tmp_path / "run", every_steps=None)
    trainer.train()
    theirs = save(trainer, tmp_path / "theirs", lambda: Trainer._save_checkpoint(trainer, trainer.model, None))
    ours = save(trainer, tmp_path / "ours", lambda: trainer.checkpointer.save_once("full"))
    assert differing(theirs, ours) == [] and damages(ours) == []
    behind = save(trainer, tmp_path / "behind", lambda: in_background(trainer))
    assert differing(theirs, behind) == [] and damages(behind) == []


def test_where_memory_is_short_training_waits_for_saves_and_says_so_once(tiny_recipe, tmp_path, monkeypatch):
    monkeypatch.setattr("cpt.training.saving.MOST_OF_THE_MEMORY", 0.0)
    trainer = trainer_of(tiny_recipe, tmp_path, in_background=True)
    trainer.train()
    assert events(trainer) == [("saves_block", 1)] and len(published(trainer)) == 3


def test_the_trainers_own_saving_of_a_model_is_left_alone(tiny_recipe, tmp_path):
    trainer = trainer_of(tiny_recipe, tmp_path)
    trainer.save_model(str(tmp_path / "model"))
    assert {"config.json", "model.safetensors"} <= {path.name for path in (tmp_path / "model").iterdir()}
