import subprocess
import sys

import psutil
import pytest
from transformers import TrainerControl, TrainerState

from cpt.monitoring.machine import Counters, MachineUse, memory_of_processes, read_counters, use_between


def test_rates_are_means_of_the_time_between_two_looks():
    before = Counters(10.0, 100.0, 40.0, {"disk_read_mib_per_second": 2**20})
    after = Counters(14.0, 116.0, 52.0, {"disk_read_mib_per_second": 9 * 2**20, "network_sent_mib_per_second": 5})
    assert use_between(before, after) == {
        "cpu_percent": 75.0,
        "disk_read_mib_per_second": 2.0,
        "network_sent_mib_per_second": 0.0,
    }
    assert use_between(before, before) == {}


def test_where_nobody_counts_disks_there_is_no_rate(monkeypatch):
    monkeypatch.setattr(psutil, "disk_io_counters", lambda: None)
    assert read_counters().bytes.keys() == {"network_received_mib_per_second", "network_sent_mib_per_second"}


def test_memory_is_that_of_the_process_and_of_those_below():
    ballast = "x = bytearray(50_000_000); print('there', flush=True); input()"
    above = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {ballast!r}])"
    with subprocess.Popen([sys.executable, "-c", above], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        top = psutil.Process(child.pid)
        alone = top.memory_info().rss
        assert alone < 50_000_000 < memory_of_processes(top) - alone < 150_000_000
        child.stdin.close()


@pytest.mark.parametrize(
    ("is_main", "logs", "looked"),
    [(True, {"loss": 1}, True), (False, {"loss": 1}, False), (True, {"eval_loss": 1}, False)],
)
def test_the_main_process_looks_at_logs_of_the_training_loss(is_main, logs, looked):
    callback, state = MachineUse(), TrainerState(is_world_process_zero=is_main)
    callback.on_train_begin(None, state, TrainerControl())
    callback.on_log(None, state, TrainerControl(), logs=logs)
    assert ("host_memory_gib" in logs) == looked
