import os
import sys
from pickle import UnpicklingError

import numpy as np
import pytest
import torch

from cpt.checkpoints.model_folder import FORCE_CODE, FORCE_DATA, harmless_classes, load_data, only_data
from cpt.checkpoints.sharding import consolidated_state, make_universal
from cpt.errors import CheckpointError


class Planted:
    """Unpickling it writes a file."""

    def __init__(self, mark):
        self.mark = str(mark)

    def __reduce__(self):
        return os.mkdir, (self.mark,)


@pytest.fixture
def planted(tmp_path):
    """A checkpoint of ZeRO's parts in which every pickle has a passenger, and the folder that it makes when it
    runs."""
    parts = tmp_path / "checkpoint-3" / "global_step3"
    parts.mkdir(parents=True)
    (parts.parent / "latest").write_text("global_step3")
    for name in ("mp_rank_00_model_states.pt", "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"):
        torch.save(
            {"module": {}, "optimizer_state_dict": {"zero_stage": 2}, "x": Planted(tmp_path / "ran")}, parts / name
        )
    return parts.parent, tmp_path / "ran"


def test_tensors_numbers_and_the_states_of_random_numbers_are_read(tmp_path):
    content = {"tensor": torch.arange(3), "numpy": np.random.RandomState(1).get_state(), "step": 3, "names": ["a"]}
    torch.save(content, tmp_path / "f.pt")
    read = load_data(tmp_path / "f.pt")
    assert torch.equal(read["tensor"], content["tensor"]) and np.array_equal(read["numpy"][1], content["numpy"][1])


def test_a_planted_pickle_is_refused_by_name_and_never_runs(planted):
    checkpoint, ran = planted
    with pytest.raises(CheckpointError, match=r"would call posix.mkdir. It was not read"):
        load_data(checkpoint / "global_step3" / "mp_rank_00_model_states.pt")
    assert not ran.exists()


def test_it_is_refused_also_where_the_reader_asks_for_all_of_it(planted):
    checkpoint, ran = planted
    with pytest.raises(CheckpointError), only_data(checkpoint):
        torch.load(checkpoint / "global_step3" / "mp_rank_00_model_states.pt", weights_only=False)
    assert not ran.exists()


def test_putting_zeros_parts_together_runs_nothing(planted):
    checkpoint, ran = planted
    with pytest.raises(CheckpointError, match=r"posix.mkdir"):
        consolidated_state(checkpoint)
    assert not ran.exists()


def test_converting_for_another_number_of_processes_runs_nothing(planted, tmp_path):
    checkpoint, ran = planted
    with pytest.raises(CheckpointError, match=r"posix.mkdir"):
        make_universal(checkpoint, tmp_path)
    assert not ran.exists() and not list(tmp_path.glob(".universal-*"))


def test_who_is_trusted_is_trusted_all_the_way_down(planted):
    checkpoint, ran = planted
    with only_data(checkpoint, trust=True):
        load_data(checkpoint / "global_step3" / "mp_rank_00_model_states.pt")
    assert ran.exists()


def test_torchs_switches_are_as_before_afterwards(tmp_path, monkeypatch):
    monkeypatch.setenv(FORCE_CODE, "1")
    with only_data(tmp_path):
        assert os.environ[FORCE_DATA] == "1" and FORCE_CODE not in os.environ
        with only_data(tmp_path):
            pass
        assert os.environ[FORCE_DATA] == "1"
    assert os.environ[FORCE_CODE] == "1" and FORCE_DATA not in os.environ


def test_a_damaged_file_is_called_damaged(tmp_path):
    with pytest.raises(CheckpointError, match="is damaged"), only_data(tmp_path):
        raise UnpicklingError("pickle data was truncated")


def test_deepspeeds_classes_are_known_where_deepspeed_is_used():
    pytest.importorskip("deepspeed.checkpoint.ds_to_universal")
    assert {known.__name__ for known in harmless_classes()} >= {
        "LossScaler",
        "ZeroStageEnum",
        "fragment_address",
        "ndarray",
    }
    assert "deepspeed" in sys.modules
