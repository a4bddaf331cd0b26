"""A loss in chunks where the head is wrapped, split and fetched: the same losses as with whole logits."""

import pytest
from launching import launch, losses, zero_profile
from tiny import write_recipe


@pytest.mark.long
@pytest.mark.parametrize(
    ("stage", "tied"),
    [
        pytest.param(0, True, marks=pytest.mark.slow, id="DDP"),
        pytest.param(3, True, marks=pytest.mark.long, id="ZeRO-3, tied"),
        pytest.param(3, False, marks=pytest.mark.long, id="ZeRO-3"),
    ],
)
def test_two_processes_have_the_same_losses(tiny_recipe, tmp_path, stage, tied):
    found = {}
    for fused in (False, True):
        name = f"fused-{fused}"
        training = {**tiny_recipe["training"], "gradient_checkpointing": True}
        if stage:
            training["deepspeed"] = zero_profile(tmp_path, stage)
        model = {
            **tiny_recipe["model"],
            "fused_loss": fused,
            "config": {**tiny_recipe["model"]["config"], "tie_word_embeddings": tied},
        }
        recipe = write_recipe(
            {**tiny_recipe, "name": name, "model": model, "training": training}, tmp_path / f"{name}.yaml"
        )
        result = launch(recipe, way="torchrun", processes=2)
        assert result.returncode == 0, result.stdout + result.stderr
        found[fused] = losses(tmp_path / "runs" / name)
    assert len(found[True]) == 8 and found[True] == pytest.approx(found[False], rel=1e-5)
