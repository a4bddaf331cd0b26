"""What only a CUDA GPU can show; `make test-gpu`. Without one these tests fail, they are not skipped."""

import json

import pytest
from launching import ROOT, launch, launch_to_its_end, losses
from resuming import differences, forget_after, recipe_of
from tiny import write_recipe

pytestmark = pytest.mark.gpu
PROFILES = ("ds_config_prototype", "ds_config_8b_24gb", "ds_config_zero1", "ds_config_production")


@pytest.fixture(scope="module")
def plain_losses():
    """Of the run without DeepSpeed, which the first test that needs them trains."""
    return []


def run_losses(sections, tmp_path, name, **training):
    sections = {**sections, "name": name, "training": {**sections["training"], **training}}
    result = launch(write_recipe(sections, tmp_path / f"{name}.yaml"))
    assert result.returncode == 0, result.stdout + result.stderr
    return losses(tmp_path / "runs" / name)


def test_the_gpu_is_used_and_agrees_with_the_cpu(tiny_recipe, tmp_path):
    on_gpu = run_losses(tiny_recipe, tmp_path, "on-gpu")
    on_cpu = run_losses(tiny_recipe, tmp_path, "on-cpu", use_cpu=True)
    assert on_gpu == pytest.approx(on_cpu, rel=1e-4)


@pytest.mark.parametrize("profile", PROFILES)
def test_each_deepspeed_profile_trains_in_bf16(tiny_recipe, tmp_path, plain_losses, profile):
    path = str(ROOT / "deepspeed_configs" / f"{profile}.json")
    found = run_losses(tiny_recipe, tmp_path, profile, bf16=True, deepspeed=path)
    if (
        not plain_losses
    ):  # after the first profile: a profile that fails must show in the first minute
        plain_losses.extend(run_losses(tiny_recipe, tmp_path, "plain", bf16=True))
    assert found == pytest.approx(plain_losses, rel=2e-2)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_run_on_the_gpu_resumes_bit_for_bit(tiny_recipe, tmp_path, stage):
    # Else attention's backward pass adds up in any order
    tiny_recipe["training"] |= {"bf16": True, "full_determinism": True}
    recipe, run = recipe_of(tiny_recipe, tmp_path, stage=stage), tmp_path / "runs" / "tiny"
    launch_to_its_end(recipe)
    straight, last = losses(run), (run / "checkpoint-8").rename(tmp_path / "straight")
    forget_after(run, 3)
    launch_to_its_end(recipe)
    assert losses(run) == straight and differences(last, run / "checkpoint-8") == []
    manifest = json.loads((run / "checkpoint-8" / "manifest.json").read_text())
    assert manifest["exactness"].startswith("bit-exact")
