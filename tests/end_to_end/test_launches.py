"""One program, five ways to start it: the same losses at the same global batch."""

import pytest
from launching import WAYS, launch, losses, zero_profile
from tiny import write_recipe


def run_losses(sections, tmp_path, *, way, processes=1, stage=0, via_yaml=False):
    """Losses of the recipe, started that way; stage is ZeRO's, 0 is plain or DDP."""
    name = f"{way}-{processes}-zero{stage}"
    profile = zero_profile(tmp_path, stage) if stage else None
    training = {**sections["training"], "bf16": False}
    if profile and not via_yaml:
        training["deepspeed"] = profile
    recipe = write_recipe({**sections, "name": name, "training": training}, tmp_path / f"{name}.yaml")
    result = launch(recipe, way=way, processes=processes, deepspeed=profile if via_yaml else None)
    assert result.returncode == 0, result.stdout + result.stderr
    return losses(tmp_path / "runs" / name)


@pytest.mark.slow
def test_all_five_launches_have_the_same_losses(tiny_recipe, tmp_path):
    alone = {way: run_losses(tiny_recipe, tmp_path, way=way) for way in ("cpt", "python", "accelerate")}
    ddp = {way: run_losses(tiny_recipe, tmp_path, way=way, processes=2) for way in ("torchrun", "accelerate")}
    zero2 = {
        way: run_losses(tiny_recipe, tmp_path, way=way, processes=2, stage=2) for way in ("torchrun", "deepspeed")
    }
    zero3 = {"accelerate": run_losses(tiny_recipe, tmp_path, way="accelerate", processes=2, stage=3, via_yaml=True)}
    assert {*alone, *ddp, *zero2, *zero3} == set(WAYS)
    for same_backend in (alone, ddp, zero2, zero3):
        first, *others = same_backend.values()
        assert all(other == first for other in others), same_backend
    for other in (ddp, zero2, zero3):
        assert next(iter(other.values())) == pytest.approx(alone["python"], rel=1e-5)
