import pytest
import torch
from safetensors.torch import save_file
from tiny_run import save_checkpoint, seal

from cpt.checkpoints.manifest import read_manifest
from cpt.rehearsal.comparing import compared

LOSSES = {1: 5.0, 2: 4.5, 3: 4.0, 4: 3.5}
ROUNDING = "rounding: GPU kernels add in any order"


@pytest.fixture
def exports(tmp_path):
    """Two models, the same, and a way to change the second."""

    def write(name, change=0.0):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        save_file({"w": torch.tensor([1.0, 2.0 + change])}, folder / "model.safetensors")
        seal(folder, 4, kind="weights")
        return folder

    return write("one"), lambda change=0.0: write("other", change)


def manifest(folder, exactness="bit-exact"):
    return read_manifest(save_checkpoint(folder / exactness[:3], 2, exactness=exactness))


def test_the_same_bits_are_the_same_run(tmp_path, exports):
    found = compared(LOSSES, {3: 4.0, 4: 3.5}, (exports[0], exports[1]()), manifest(tmp_path), half=False)
    assert (
        found.verdict == "ok"
        and found.figure == "steps 3, 4 in new processes: the same losses and weights, bit for bit"
    )


def test_a_run_that_promises_the_same_bits_must_give_them(tmp_path, exports):
    bits = manifest(tmp_path)
    for resumed, change in (({3: 4.0, 4: 3.5000000001}, 0.0), ({3: 4.0, 4: 3.5}, 1e-6)):
        found = compared(LOSSES, resumed, (exports[0], exports[1](change)), bits, half=False)
        assert (found.verdict, found.error) == ("FAILED", "CheckpointError") and "bit for bit" in found.figure


def test_rounding_is_reported_where_the_run_promises_no_more_and_only_rounding(tmp_path, exports):
    rounds = manifest(tmp_path, ROUNDING)
    pair = exports[0], exports[1](1e-4)
    near = compared(LOSSES, {3: 4.0004, 4: 3.5}, pair, rounds, half=False)
    assert (
        near.verdict == "ok"
        and "losses differ by 1.0e-04, weights by 5.0e-05" in near.figure
        and ROUNDING in near.figure
    )
    assert compared(LOSSES, {3: 4.04, 4: 3.5}, pair, rounds, half=False).verdict == "FAILED"
    assert compared(LOSSES, {3: 4.04, 4: 3.5}, pair, rounds, half=True).verdict == "ok"
    assert compared(LOSSES, {3: float("nan"), 4: 3.5}, pair, rounds, half=True).verdict == "FAILED"


def test_a_step_that_was_not_made_again_is_missed(tmp_path, exports):
    assert "no step 4" in compared(LOSSES, {3: 4.0}, (exports[0], exports[1]()), manifest(tmp_path), half=False).figure


def test_without_exports_losses_alone_are_compared(tmp_path):
    found = compared(LOSSES, {3: 4.0, 4: 3.5}, (tmp_path / "a", tmp_path / "b"), manifest(tmp_path), half=False)
    assert found.verdict == "ok" and "the same losses, bit for bit" in found.figure
