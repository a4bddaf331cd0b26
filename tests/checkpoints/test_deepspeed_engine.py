"""DeepSpeed's own saving is in tests/end_to_end/test_saving.py; here: nothing of it reaches the disk, and the engine
is left as it was."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from cpt.checkpoints.deepspeed_engine import capture_states, files_beside
from cpt.errors import CheckpointError


class Engine:
    """What of DeepSpeed's engine saving touches."""

    def __init__(self, *, swaps=False, folder=None):
        self.checkpoint_engine, self.global_steps, self.swaps = "DeepSpeed's", 3, swaps
        self.optimizer = SimpleNamespace(optimizer_swapper=SimpleNamespace(swap_folder=folder))

    def zero_nvme_offload_optimizer(self):
        return self.swaps

    def _copy_recovery_script(self, folder):
        raise AssertionError("it would write")

    def save_checkpoint(self, folder):
        self.checkpoint_engine.makedirs(f"{folder}/global_step3", exist_ok=True)
        self.checkpoint_engine.create(None)
        self.checkpoint_engine.save(state_dict={"step": 3}, path=f"{folder}/global_step3/states.pt")
        assert not self.zero_nvme_offload_optimizer()
        self._copy_recovery_script(folder)
        assert self.checkpoint_engine.commit(None)


def test_states_are_kept_by_their_path_and_nothing_is_written(tmp_path):
    engine = Engine(swaps=True)
    with capture_states(engine, tmp_path / "nowhere") as kept:
        engine.save_checkpoint(str(tmp_path / "nowhere"))
    assert kept.states == {"global_step3/states.pt": {"step": 3}} and list(tmp_path.iterdir()) == []


def test_afterwards_the_engine_is_what_it_was(tmp_path):
    engine = Engine(swaps=True)
    with pytest.raises(RuntimeError, match="stop"), capture_states(engine, tmp_path):
        raise RuntimeError("stop")
    assert engine.checkpoint_engine == "DeepSpeed's" and engine.zero_nvme_offload_optimizer()
    with pytest.raises(AssertionError, match="it would write"):
        engine._copy_recovery_script(tmp_path)


def test_scripts_come_with_the_main_process_and_swapped_tensors_with_each(tmp_path):
    (tmp_path / "rank1").mkdir()
    for name in ("moment.tensor", "gradient.tensor"):
        (tmp_path / "rank1" / name).touch()
    assert set(files_beside(Engine(), rank=0)) == {"zero_to_fp32.py", "zero_to_torch.py"}
    copied = files_beside(Engine(swaps=True, folder=str(tmp_path)), rank=1)
    assert copied == {"global_step3/offloaded_tensors/rank1/rank1/moment.tensor": tmp_path / "rank1" / "moment.tensor"}


def test_it_loads_data_only(tmp_path):
    torch.save({"call": Path}, tmp_path / "states.pt")
    with capture_states(Engine(), tmp_path) as kept, pytest.raises(CheckpointError, match="more than tensors"):
        kept.load(str(tmp_path / "states.pt"))
