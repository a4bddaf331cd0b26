import shutil

import pytest
import torch
from launching import launch, zero_profile
from tiny import write_recipe
from transformers import AutoModelForCausalLM

from cpt.checkpoints.manifest import MANIFEST
from cpt.checkpoints.sharding import consolidated_state, make_universal
from cpt.errors import CheckpointError
from cpt.export.trained import find_trained
from cpt.export.write import ExportOptions, export_whole

LOGITS_OF = torch.arange(30).unsqueeze(0)


def test_parts_that_cannot_be_read_are_refused(tmp_path):
    (tmp_path / "latest").write_text("global_step3")
    with pytest.raises(CheckpointError, match="global_step3"):
        consolidated_state(tmp_path)
    (tmp_path / "global_step3").mkdir()
    (tmp_path / "global_step3" / "zero_pp_rank_0_mp_rank_00_model_states.pt").write_bytes(b"cut")
    with pytest.raises(CheckpointError, match="the parts of all processes"):
        consolidated_state(tmp_path)


@pytest.mark.long
@pytest.mark.parametrize(
    ("stage", "lora"),
    [
        pytest.param(3, True, marks=pytest.mark.slow),
        *(pytest.param(stage, False, marks=pytest.mark.long) for stage in (2, 3)),
    ],
)
def test_a_checkpoint_of_which_only_zeros_parts_are_left_is_exported(tiny_recipe, tmp_path, stage, lora):
    if lora:
        assert launch(write_recipe({**tiny_recipe, "name": "base"}, tmp_path / "base.yaml")).returncode == 0
        tiny_recipe |= {"stage": "cpt", "model": {"path": str(tmp_path / "runs" / "base" / "final"), "lora": {"r": 4}}}
    tiny_recipe["training"] |= {"bf16": True, "deepspeed": zero_profile(tmp_path, stage)}
    ended = launch(write_recipe(tiny_recipe, tmp_path / "r.yaml"), way="torchrun", processes=2)
    assert ended.returncode == 0, ended.stderr
    run = tmp_path / "runs" / "tiny"
    parts = shutil.copytree(run / "checkpoint-8", run / "checkpoint-9")
    # As the Trainer leaves it where DeepSpeed does not gather the weights; a manifest would tell that files are
    # missing.
    for file in [*parts.glob("*.safetensors"), *parts.glob("adapter_config.json"), parts / MANIFEST]:
        file.unlink()
    assert find_trained(parts).kind == "zero" and find_trained(parts).is_adapter == lora
    list(export_whole(find_trained(parts), tmp_path / "export", ExportOptions(torch.bfloat16)))
    exported, final = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for folder in (tmp_path / "export", run / "final")
    )
    assert torch.allclose(
        exported(LOGITS_OF).logits, final(LOGITS_OF).logits, atol=5e-3
    )  # final was rounded to bf16 elsewhere


@pytest.fixture
def checkpoint(tmp_path):
    """ZeRO's parts, none of which can be read."""
    parts = tmp_path / "checkpoint-4" / "global_step4"
    parts.mkdir(parents=True)
    (parts.parent / "latest").write_text("global_step4")
    (parts / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt").write_bytes(bytes(1000))
    return parts.parent


def test_what_cannot_be_converted_names_the_way_out_and_leaves_nothing(checkpoint, tmp_path):
    with pytest.raises(CheckpointError):
        make_universal(checkpoint, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-4"]
