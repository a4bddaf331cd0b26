import errno
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
from safetensors import SafetensorError

from cpt.checkpoints.snapshot import NotFiniteError
from cpt.checkpoints.transaction import Agreement, SaveFailed, reason_of

TORCHRUN = Path(sys.executable).with_name("torchrun")
PROGRAM = """
import threading
from datetime import timedelta
import torch, torch.distributed as dist
from cpt.checkpoints.transaction import Agreement, SaveFailed
dist.init_process_group("gloo")
agreement, rank = Agreement(timedelta(seconds=60)), dist.get_rank()
def full():
    if rank == 1:
        raise OSError(28, "No space left on device", "/runs/x")
    return "written"
heard = []
def save():
    for number in range(50):
        heard.append(agreement.gather((rank, number)))
    try:
        agreement.together(full)
    except SaveFailed as failure:
        heard.append((failure.reason, str(failure), isinstance(failure.__cause__, OSError)))
    heard.append(agreement.on_main(lambda: rank + 10))
thread = threading.Thread(target=save)
thread.start()
for number in range(50):  # what training does meanwhile
    total = torch.ones(1000)
    dist.all_reduce(total)
    assert total[0] == 2
thread.join()
assert heard[:50] == [[(0, number), (1, number)] for number in range(50)], heard
assert heard[50] == ("storage", "process 1: No space left on device (/runs/x)", rank == 1), heard[50]
assert heard[51] == 10
dist.barrier()
print("agreed", flush=True)
import os
os._exit(0)
"""


@pytest.mark.slow
def test_what_fails_on_one_process_fails_on_all_while_training_goes_on(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    words = [TORCHRUN, "--standalone", "--nproc_per_node=2", tmp_path / "program.py"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, cwd=Path(__file__).parents[2])
    assert done.returncode == 0 and done.stdout.count("agreed") == 2, done.stderr


def test_alone_a_failure_says_nothing_of_processes():
    with pytest.raises(SaveFailed, match="^No space left on device") as failed:
        Agreement(timedelta(seconds=1)).together(lambda: Path("/dev/full").write_text("x"))
    assert failed.value.reason == "storage"


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (OSError(errno.EIO, "Input/output error"), "storage"),
        (SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"), "storage"),
        (SafetensorError("Error while serializing: InvalidTensorView"), "error"),
        (NotFiniteError("NaN"), "not finite"),
        (SaveFailed("storage", "x"), "storage"),
        (KeyError("x"), "error"),
    ],
)
def test_only_what_a_later_save_may_do_better_is_of_the_storage(problem, reason):
    assert reason_of(problem) == reason
