"""The files that `cpt launch` writes start a run on two hosts, and stop it, with the losses of one machine."""

import signal
import subprocess
import time

import pytest
from several_hosts import several_hosts
from written_launch import STEPS, losses, status, work_folder, write_launch

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]
HOSTS = ("--nodes", "2", "--hosts", "host-0,host-1", "--no-ssh")


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    with several_hosts(2, folder=tmp_path_factory.mktemp("hosts")) as hosts:
        yield hosts


@pytest.fixture
def work(tiny_recipe, tmp_path):
    return work_folder(tiny_recipe, tmp_path)


def on_one_machine(work):
    script = write_launch(work, "straight", "--gpus-per-node", "2") / "node.sh"
    done = subprocess.run(["bash", str(script)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return losses(work, "straight")


def test_torchrun_on_two_hosts_is_stopped_and_goes_on_as_if_nothing_had_been(work, hosts):
    straight = on_one_machine(work)
    folder = write_launch(work, "torchrun", *HOSTS)
    log = work / "start.log"
    start = hosts[0].start(["bash", str(folder / "start.sh")], log=log)
    while max(losses(work, "torchrun"), default=0) < STEPS // 4:
        assert start.poll() is None, log.read_text()
        time.sleep(0.05)
    start.send_signal(signal.SIGINT)
    assert start.wait(120) != 0
    stopped = status(work, "torchrun")
    assert (stopped["state"], stopped["exit_code"]) == ("interrupted", 75) and stopped["step"] < STEPS
    assert (
        "The run is told to save and end." in log.read_text()
        and f"checkpoint-{stopped['step']} is saved" in log.read_text()
    )
    again = hosts[1].run(
        ["bash", str(folder / "start.sh")], timeout=300
    )  # from the other host: who starts it takes no part
    assert again.returncode == 0, again.stdout
    assert "host-0: 2 nodes fit together: host-0, host-1" in again.stdout
    assert losses(work, "torchrun") == straight and len(straight) == STEPS


@pytest.mark.parametrize("engine", ["accelerate", "deepspeed"])
def test_the_other_launchers_start_zero_on_two_hosts(work, hosts, engine):
    autos = "".join(
        f"{key}: auto, "
        for key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    )
    profile = f"training.deepspeed={{{autos}zero_optimization: {{stage: 2}}}}"
    folder = write_launch(work, engine, profile, "budget.tokens=4096", *HOSTS, "--launcher", engine)
    done = hosts[0].run(["bash", str(folder / "start.sh")], timeout=300)
    assert done.returncode == 0, done.stdout
    assert status(work, engine)["state"] == "finished" and len(losses(work, engine)) == 8
    assert '"launcher": "' + engine in (work / "runs" / engine / "environment.json").read_text()


def test_a_host_that_is_off_is_named_before_files_are_written(work, hosts):
    words = [
        "python",
        "-m",
        "cpt",
        "launch",
        "recipe.yaml",
        "--nodes",
        "3",
        "--hosts",
        "host-0,host-1,host-9",
        "budget.global_batch_tokens=768",
    ]
    done = hosts[0].run(words, cwd=work)
    assert done.returncode == 2 and "1 of 3 hosts cannot be reached by ssh:\n  host-9: " in done.stderr
