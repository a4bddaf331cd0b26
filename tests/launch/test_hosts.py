"""The files of `cpt launch` on two hosts of this machine: what happens when one of them is lost. As root."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from launching import zero_profile
from several_hosts import several_hosts, wait_for
from tiny import write_recipe

from cpt.cli import main
from cpt.runs.events import read_events

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]
STEPS, BIN, ROOT = 24, Path(sys.executable).parent, Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": f"{BIN}:{os.environ['PATH']}"}


@pytest.fixture
def launch(tiny_recipe, tmp_path, monkeypatch):
    """Write node.sh for two hosts; returns it."""
    tiny_recipe |= {
        "output_dir": "runs",
        "budget": {"tokens": STEPS * 16_384, "global_batch_tokens": 16_384},
    }
    tiny_recipe["checkpoints"] = {"every_steps": 4}
    tiny_recipe["training"] |= {"use_cpu": True, "ddp_timeout": 20}
    write_recipe(tiny_recipe, tmp_path / "recipe.yaml")
    monkeypatch.chdir(tmp_path)

    def written(name: str, *more: str) -> Path:
        words = [
            "--nodes",
            "2",
            "--hosts",
            "host-0,host-1",
            "--venv",
            str(BIN.parent),
            "--output",
            f"launch/{name}",
        ]
        with pytest.raises(SystemExit) as ended:
            main(["launch", "recipe.yaml", f"name={name}", *words, *more])
        assert ended.value.code == 0
        return tmp_path / "launch" / name / "node.sh"

    return written


@pytest.fixture
def hosts(tmp_path):
    with several_hosts(2, folder=tmp_path) as hosts:
        yield hosts


def losses(name: str) -> dict[int, float]:
    lines = map(json.loads, Path("runs", name, "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def straight() -> dict[int, float]:
    words = [BIN / "cpt", "train", "recipe.yaml", "name=straight", "--processes", "2"]
    subprocess.run(words, env=ENVIRONMENT, check=True, capture_output=True, timeout=300)
    return losses("straight")


def start(hosts, script, *which) -> list:
    logs = [(host, script.with_suffix(f".{host.name}.log")) for host in hosts]
    return [
        host.start(["bash", script, str(rank)], env=ENVIRONMENT, log=log)
        for rank, (host, log) in enumerate(logs)
        if not which or rank in which
    ]


def wait_for_step(script: Path, step: int) -> None:
    log = script.with_suffix(".host-0.log")
    wait_for(lambda: f"step {step}/" in log.read_text(), seconds=240)


def test_a_lost_host_is_named_and_the_run_resumes_without_it(hosts, launch):
    script = launch("power")
    nodes = start(hosts, script)
    wait_for_step(script, 9)
    hosts[1].power_off()
    assert nodes[0].wait(90) == 2
    status = json.loads(Path("runs/power/status.json").read_text())
    assert (status["error"], status["exit_code"]) == (
        "LaunchError",
        2,
    ) and "host-1 (process 1)" in status["message"]
    assert read_events(Path("runs/power"))[0]["kind"] == "lost"
    words = [BIN / "cpt", "train", "recipe.yaml", "name=power"]
    subprocess.run(words, env=ENVIRONMENT, check=True, capture_output=True, timeout=300)
    assert losses("power") == pytest.approx(straight(), rel=2e-6) and len(losses("power")) == STEPS


def test_supervisors_on_both_hosts_resume_after_a_reboot_bit_for_bit(hosts, launch):
    script = launch("reboot")
    script.write_text(script.read_text().replace("    --launcher", "    --supervise --launcher"))
    nodes = start(hosts, script)
    wait_for_step(script, 9)
    hosts[1].power_off(reboot=True)
    hosts[1].power_on()
    nodes[1:] = start(hosts, script, 1)
    assert [node.wait(300) for node in nodes] == [0, 0], script.with_suffix(
        ".host-0.log"
    ).read_text()
    assert losses("reboot") == straight() and len(losses("reboot")) == STEPS
    assert "restart" in [event["kind"] for event in read_events(Path("runs/reboot"))]


def test_deepspeeds_launcher_starts_one_run_on_both_hosts(hosts, launch, tmp_path):
    script = launch(
        "zero", "--launcher", "deepspeed", f"training.deepspeed={zero_profile(tmp_path, 2)}"
    )
    nodes = start(hosts, script)
    assert [node.wait(300) for node in nodes] == [0, 0], script.with_suffix(
        ".host-0.log"
    ).read_text()
    assert losses("zero") == pytest.approx(straight(), rel=1e-4) and len(losses("zero")) == STEPS


SSHD = shutil.which("sshd", path="/usr/sbin:/usr/bin")


@pytest.fixture
def by_ssh(hosts, tmp_path):
    """The environment in which `ssh` reaches both hosts; each runs a server with a key of this test."""
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "key"], check=True
    )
    Path("/run/sshd").mkdir(exist_ok=True)
    options = [
        f"-oHostKey={tmp_path}/key",
        f"-oAuthorizedKeysFile={tmp_path}/key.pub",
        "-oStrictModes=no",
    ]
    for host in hosts:
        server = [SSHD, "-D", "-e", "-f", "/dev/null", *options, "-oPidFile=none"]
        host.start(server, env=ENVIRONMENT, log=tmp_path / f"sshd-{host.name}.log")
    passed_on = (
        "PATH",
        "OMP_NUM_THREADS",
        "TORCH_EXTENSIONS_DIR",
        "HF_HUB_OFFLINE",
    )  # ssh passes nothing on
    lines = [f"{name}={ENVIRONMENT[name]}\n" for name in passed_on if name in ENVIRONMENT]
    (tmp_path / ".deepspeed_env").write_text("".join(lines))
    client = f"-F /dev/null -i {tmp_path}/key -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null"
    return {**ENVIRONMENT, "PDSH_SSH_ARGS_APPEND": client, "PYTHONPATH": str(ROOT)}


@pytest.mark.skipif(not (SSHD and shutil.which("pdsh")), reason="needs pdsh and openssh-server")
def test_deepspeed_starts_the_hosts_of_a_hostfile_itself(hosts, launch, by_ssh, tmp_path):
    profile = f"training.deepspeed={zero_profile(tmp_path, 2)}"
    hostfile = launch("pdsh", "--launcher", "deepspeed", profile).with_name("hostfile")
    where = ["--hostfile", hostfile, "--no_ssh_check", "--master_addr", hosts[0].address]
    words = [BIN / "deepspeed", *where, ROOT / "cpt/train.py", "recipe.yaml", "name=pdsh", profile]
    started = hosts[0].start(words, env=by_ssh, log=tmp_path / "log")
    assert started.wait(500) == 0, (tmp_path / "log").read_text()
    assert losses("pdsh") == pytest.approx(straight(), rel=1e-4) and len(losses("pdsh")) == STEPS
