from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from tiny_run import save_checkpoint
from torch import nn

from cpt.checkpoints.manifest import FileEntry, read_manifest, write_manifest
from cpt.errors import CheckpointError
from cpt.recipe.schema import Optimizer
from cpt.stages.checkpointing.other_ways import OtherWays, way_written


class Here(OtherWays):
    """A run of some way, as far as checkpoints ask."""

    way = "plain"
    zero_section = None

    def __init__(self, way="plain", *, optimizer="adamw", fp16=False, zero=None):
        self.way, self.zero_section = way, zero
        self.args, self.recipe = SimpleNamespace(fp16=fp16), SimpleNamespace(optimizer=Optimizer(name=optimizer))


@pytest.fixture
def plain(tmp_path):
    """A checkpoint of one process, and its manifest."""
    checkpoint = save_checkpoint(tmp_path, 4)
    return checkpoint, read_manifest(checkpoint)


def of_fsdp(manifest):
    return replace(manifest, files={**manifest.files, "fsdp/part_0_of_1.pt": FileEntry(1, "")})


@pytest.mark.parametrize("way", ["plain", "fsdp", "zero-1", "zero-2", "zero-3"])
def test_adamw_goes_from_any_way_to_any_other(plain, way):
    checkpoint, manifest = plain
    for written in (manifest, of_fsdp(manifest), *(replace(manifest, zero_stage=stage) for stage in (1, 2, 3))):
        Here(way).refuse_other_way(checkpoint, written)


@pytest.mark.parametrize(
    ("here", "stage", "said"),
    [
        (Here("fsdp", fp16=True), None, "fp16's scale of the loss"),
        (Here("plain"), 0, "in a form of its own"),
        (Here("zero-2", optimizer="sgd"), None, "converted for adamw only, and `optimizer.name` is sgd"),
        (Here("zero-3", zero={"offload_param": {"device": "nvme"}}), 2, "tensors on NVMe"),
        (Here("zero-3", zero={"zero_hpz_partition_size": 8}), None, "second copies"),
    ],
)
def test_what_cannot_be_converted_exactly_is_refused_with_the_reason(plain, here, stage, said):
    checkpoint, manifest = plain
    with pytest.raises(CheckpointError, match=f"{said}.*Start it as before, or anew with --new"):
        here.refuse_other_way(checkpoint, replace(manifest, zero_stage=stage))


def test_any_optimizer_goes_to_fsdp_and_back(plain):
    checkpoint, manifest = plain
    Here("fsdp", optimizer="sgd").refuse_other_way(checkpoint, manifest)
    Here("plain", optimizer="sgd").refuse_other_way(checkpoint, of_fsdp(manifest))


def test_what_other_programs_wrote_is_not_converted(tmp_path):
    (tmp_path / "latest").write_text("global_step1")
    with pytest.raises(CheckpointError, match="written with DeepSpeed, by no version of cpt, .* no sharding"):
        Here("plain").refuse_other_way(tmp_path, None)
    (tmp_path / "latest").unlink()
    Here("plain").refuse_other_way(tmp_path, None)
    with pytest.raises(CheckpointError, match="without DeepSpeed, .* FSDP2"):
        Here("fsdp").refuse_other_way(tmp_path, None)


def test_only_its_own_way_is_read_as_ever(plain, tmp_path):
    checkpoint, _ = plain
    assert way_written(checkpoint) == "plain" and way_written(tmp_path / "nowhere") is None
    assert not Here("plain").reads_by_name(checkpoint) and Here("zero-2").reads_by_name(checkpoint)
    assert Here("fsdp").reads_by_name(tmp_path / "nowhere")


def test_buffers_come_from_the_models_file(tmp_path):
    here = Here()
    here.model = nn.BatchNorm1d(2)
    save_file({"running_mean": torch.tensor([3.0, 4.0]), "weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    here.load_buffers(tmp_path)
    assert here.model.running_mean.tolist() == [3, 4] and here.model.weight.tolist() == [1, 1]


@pytest.mark.parametrize("stage", [2, 3])
def test_the_optimizer_may_move_to_the_host_and_back(plain, stage):
    checkpoint, manifest = plain
    (checkpoint / "manifest.json").unlink()
    write_manifest(checkpoint, replace(manifest, zero_stage=stage))
    (checkpoint / "global_step4").mkdir()
    states = {"optimizer_state_dict": {"optimizer_state_dict": {"state": {}, "param_groups": [{"lr": 1.0}]}}}
    torch.save(states, checkpoint / "global_step4" / "x_optim_states.pt")
    offloads = {"offload_optimizer": {"device": "cpu"}}
    assert not Here(f"zero-{stage}", zero={}).is_of_other_kernel(checkpoint)
    assert not Here("fsdp").is_of_other_kernel(checkpoint)
    here = Here(f"zero-{stage}", zero=offloads)
    assert here.is_of_other_kernel(checkpoint) and not here.reads_by_name(checkpoint)
    here.moves_states = True
    assert here.said_of_states == " and its optimizer on the host"
    here.refuse_other_way(checkpoint, read_manifest(checkpoint))
    (checkpoint / "latest_universal").write_text("global_step4_universal")
    assert here.reads_by_name(checkpoint)
    here.args.fp16 = True
    with pytest.raises(CheckpointError, match="ZeRO-.* and its optimizer on the host: fp16's scale"):
        here.refuse_other_way(checkpoint, read_manifest(checkpoint))
