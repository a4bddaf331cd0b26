import pytest

from cpt.errors import ResourceError
from cpt.search.machine import environments


def test_each_trial_gets_gpus_of_its_own(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5, 6,7")
    assert environments(2, 2) == [{"CUDA_VISIBLE_DEVICES": "4,5"}, {"CUDA_VISIBLE_DEVICES": "6,7"}]
    assert environments(4, 1)[3] == {"CUDA_VISIBLE_DEVICES": "7"} and environments(1, 4) == [{}]
    with pytest.raises(ResourceError, match="--parallel 4 with 2 process.* needs 8 GPUs, and there are 4"):
        environments(4, 2)


def test_without_gpus_they_share_the_processor(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert environments(3, 2) == [{}, {}, {}]
