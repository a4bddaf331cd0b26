"""Every stage learns what its tiny recipe asks for, through `accelerate launch`: plain, under ZeRO-2 on two processes,
and with LoRA."""

import pytest
import torch
from launching import launch, zero_profile
from learned import LEARNED
from tiny import write_recipe
from tiny_tasks import TINY
from transformers import AutoConfig, AutoModelForCausalLM

from cpt.recipe.load import load_recipe


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    """What pre-training makes of the same words: an adapter is put on a model that knows them."""
    return run_tiny("pretrain", tmp_path_factory.mktemp("base"), way="python") / "final"


@pytest.fixture(scope="session")
def untrained(tmp_path_factory):
    """Random weights: what has learned to write texts is too sure of its next letter to explore answers of one."""
    folder = tmp_path_factory.mktemp("untrained")
    shape = load_recipe(TINY / "grpo.yaml").model.config
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**shape)).save_pretrained(folder)
    return folder


def run_tiny(stage, tmp_path, changes=None, *, way="accelerate", processes=1):
    """The stage's tiny recipe with changes; the run's folder."""
    sections = {"base": str(TINY / f"{stage}.yaml"), "name": stage, "output_dir": str(tmp_path), **(changes or {})}
    ended = launch(write_recipe(sections, tmp_path / "recipe.yaml"), way=way, processes=processes)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return tmp_path / stage


@pytest.mark.slow
def test_sft_learns_its_answers(tmp_path):
    LEARNED["sft"](run_tiny("sft", tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize(
    "stage",
    [pytest.param(stage, marks=[] if stage == "grpo" else pytest.mark.long) for stage in LEARNED if stage != "sft"],
)
def test_a_stage_learns(stage, tmp_path):
    LEARNED[stage](run_tiny(stage, tmp_path))


def stages(*slow):
    """All of them: these in the slow tests, the others in the long ones."""
    return [pytest.param(stage, marks=pytest.mark.slow if stage in slow else pytest.mark.long) for stage in LEARNED]


@pytest.mark.parametrize("stage", stages("dpo"))
def test_a_stage_learns_under_zero_2(stage, tmp_path):
    given = load_recipe(TINY / f"{stage}.yaml").training
    halved = {key: value // 2 for key, value in given.items() if key == "gradient_accumulation_steps"}
    training = {"deepspeed": zero_profile(tmp_path, 2), **halved}
    LEARNED[stage](run_tiny(stage, tmp_path, {"training": training}, way="torchrun", processes=2))


@pytest.mark.long
@pytest.mark.parametrize("stage", stages("sft"))
def test_a_stage_learns_with_lora(stage, tmp_path, base, untrained):
    explores = stage in ("grpo", "ppo", "spo")
    model = {
        "from_scratch": False,
        "path": str(untrained if explores else base),
        "lora": {"r": 32, "lora_alpha": 64 if explores else 32},
    }
    LEARNED[stage](run_tiny(stage, tmp_path, {"model": model}))
