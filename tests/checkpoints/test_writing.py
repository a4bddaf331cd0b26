import pytest
import torch
from full_disk import files_end_at

from cpt.checkpoints.manifest import hash_file
from cpt.checkpoints.writing import hash_durably, write_state


@pytest.mark.parametrize("numbers", [0, 3, 3_000_000])
def test_a_state_is_hashed_as_it_is_written(tmp_path, numbers):
    state = {"m": torch.arange(float(numbers)), "step": 3}
    entry = write_state(tmp_path / "below" / "optimizer.pt", state)
    assert entry == hash_file(tmp_path / "below" / "optimizer.pt") == hash_durably(tmp_path / "below" / "optimizer.pt")
    read = torch.load(tmp_path / "below" / "optimizer.pt", weights_only=True)
    assert torch.equal(read["m"], state["m"]) and read["step"] == 3


def test_what_the_disk_refuses_is_told_with_the_file(tmp_path):
    with files_end_at(5000), pytest.raises(OSError, match="File too large") as refused:
        write_state(tmp_path / "optimizer.pt", {"m": torch.zeros(10_000)})
    assert refused.value.filename == str(tmp_path / "optimizer.pt")


def test_a_mistake_in_the_state_is_told_as_it_is(tmp_path):
    with pytest.raises(AttributeError, match="local object"):
        write_state(tmp_path / "optimizer.pt", {"f": lambda: 1})
