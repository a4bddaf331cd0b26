import subprocess
import sys

import pytest

from cpt.distributed import is_main_process, main_process_decides, main_process_first, rank, world_size

SCRIPT = """
import sys
import torch.distributed as dist
from cpt.distributed import leave_processes
from cpt.errors import DataError
from cpt.distributed import is_main_process, main_process_decides, main_process_first, rank
dist.init_process_group("gloo")
order = []
def work():
    if is_main_process():
        raise DataError("the file is empty")
    return 1
try:
    main_process_first(work)
except DataError as problem:
    with open(f"{sys.argv[1]}/{rank()}", "w") as file:
        file.write(str(problem))
try:
    main_process_decides(work)
except DataError as problem:
    with open(f"{sys.argv[1]}/{rank()}", "a") as file:
        file.write(f", {problem}, chosen by {main_process_decides(rank)}")
leave_processes()
"""


def test_a_process_without_a_launcher_is_alone_and_main():
    assert (rank(), world_size(), is_main_process()) == (0, 1, True)
    assert main_process_first(lambda: 7) == main_process_decides(lambda: 7) == 7


@pytest.mark.long
def test_what_the_main_process_finds_wrong_stops_all_of_them(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", script, tmp_path],
        check=True,
        timeout=120,
    )
    assert [(tmp_path / str(number)).read_text() for number in (0, 1)] == [
        "the file is empty, the file is empty, chosen by 0"
    ] * 2
