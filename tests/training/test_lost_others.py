import pytest
import torch.distributed as dist

from cpt.errors import DataError, Interrupted, LaunchError
from cpt.training.liveness import lost_others, own_words

GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:5767"


@pytest.mark.parametrize(
    ("problem", "several", "alone"),
    [
        (RuntimeError(GLOO), True, False),
        (dist.DistBackendError("NCCL error"), True, False),
        (RuntimeError("shapes"), False, False),
    ],
)
def test_only_several_processes_can_lose_each_other(monkeypatch, problem, several, alone):
    assert lost_others(problem) is alone
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert lost_others(problem) is several


def test_a_process_says_of_its_end_what_is_its_own(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert own_words(DataError("no rows")) == "DataError: no rows"
    assert {own_words(problem) for problem in (None, LaunchError("lost"), RuntimeError(GLOO))} == {""}
    assert own_words(Interrupted("SIGTERM")).startswith("Interrupted")
