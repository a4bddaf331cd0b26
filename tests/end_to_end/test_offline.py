"""A run on local files connects to nothing outside this machine, even where nothing says that it is offline."""

import json
import os
import re
import subprocess
import sys

import pytest
from launching import BIN, ROOT, environment_of_a_run
from tiny import TINY_LLAMA, write_recipe
from tiny_tasks import TINY
from transformers import AutoConfig, AutoModelForCausalLM

FIGURES = {
    "loss_smoothed",
    "tokens",
    "step_seconds_p95",
    "share_domain",
    "tokens_general",
    "loss_domain",
    "host_memory_gib",
    "cost",
}
# Each Python process imports this `sitecustomize` when it starts.
AUDIT = """
import json, os, sys

def write_call(event, arguments):
    if event in ("socket.connect", "socket.sendto", "socket.sendmsg", "socket.getaddrinfo", "socket.gethostbyname"):
        address = arguments[0] if event in ("socket.getaddrinfo", "socket.gethostbyname") else arguments[1]
        with open(os.environ["NETWORK_CALLS"], "a") as file:
            file.write(json.dumps([event, repr(address), sys.argv[:2]]) + "\\n")

sys.addaudithook(write_call)
"""
ON_THIS_MACHINE = re.compile(r"127\.\d+\.\d+\.\d+|'::1'|'localhost'|'0\.0\.0\.0'|^'[/\\]|^b?'\\x00|^None$|^b?'/")


def train_offline(sections, folder, trackers):
    """Train in a process of its own; its folder, and the network calls that leave this machine."""
    monitoring = {
        "trackers": trackers,
        "callbacks": [{"name": "cost", "dollars_per_gpu_hour": 1.0}],
    }
    training = {**sections["training"], "project": "offline"}
    sections = {**sections, "output_dir": str(folder / "runs"), "monitoring": monitoring, "training": training}
    recipe = write_recipe(sections, folder / "recipe.yaml")
    run_with_audit(
        [str(BIN / "cpt"), "train", str(recipe)],
        folder,
        {"WANDB_MODE": "offline", "WANDB_DIR": str(folder), "TRACKIO_DIR": str(folder / "trackio")},
    )
    return folder / "runs" / sections["name"]


def run_with_audit(words, folder, variables=()):
    (folder / "audit").mkdir()
    (folder / "audit" / "sitecustomize.py").write_text(AUDIT)
    (folder / "calls.jsonl").touch()
    environment = {name: value for name, value in environment_of_a_run().items() if name != "HF_HUB_OFFLINE"}
    path = os.pathsep.join(filter(None, [str(folder / "audit"), environment.get("PYTHONPATH")]))
    environment |= {**dict(variables), "PYTHONPATH": path, "NETWORK_CALLS": str(folder / "calls.jsonl")}
    ended = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def calls_outside(folder):
    calls = [json.loads(line) for line in (folder / "calls.jsonl").read_text().splitlines()]
    return [call for call in calls if not ON_THIS_MACHINE.search(call[1])]


def test_the_audit_sees_a_call_outside_and_ignores_one_on_this_machine(tmp_path):
    program = (
        "import socket; socket.socket().connect_ex(('127.0.0.1', 9)); socket.getaddrinfo('localhost', 9);"
        "socket.socket(type=socket.SOCK_DGRAM).connect_ex(('192.0.2.1', 9))"  # an address for documentation
    )
    run_with_audit([sys.executable, "-c", program], tmp_path)
    assert [call[1] for call in calls_outside(tmp_path)] == ["('192.0.2.1', 9)"]


@pytest.mark.slow
def test_continued_pretraining_with_three_trackers(tiny_recipe, tmp_path):
    pytest.importorskip("wandb")
    pytest.importorskip("trackio")
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**TINY_LLAMA)).save_pretrained(tmp_path / "base")
    sections = {
        **tiny_recipe,
        "stage": "cpt",
        "model": {"path": str(tmp_path / "base")},
        "evaluation": {"held_out_share": 0.2},
    }
    run = train_offline(sections, tmp_path, ["tensorboard", "wandb", "trackio"])
    assert calls_outside(tmp_path) == [] and "wandb" in (tmp_path / "calls.jsonl").read_text(), "its socket is a file"
    logged = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    names = {
        name
        for line in logged
        for name in line
        if name != "step" and not name.startswith("train_") and name != "total_flos"
    }
    assert names >= {*FIGURES, "eval_domain_loss"}
    shown = {f"eval/{name[5:]}" if name.startswith("eval_") else f"train/{name}" for name in names}
    assert shown <= in_tensorboard(run)
    assert shown <= in_trackio(tmp_path / "trackio" / "offline.db")
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    content = file.read_bytes()
    assert not [name for name in shown if name.encode() not in content]


def in_tensorboard(run):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    return {
        tag
        for folder in (run / "runs").iterdir()
        for tag in reader.EventAccumulator(str(folder)).Reload().Tags()["scalars"]
    }


def in_trackio(database):
    """Its own reader finds its folder when it is imported, so it runs in a process of its own."""
    program = (
        "from trackio.sqlite_storage import SQLiteStorage as S; import json;print(json.dumps(sorted({name for run in"
        " S.get_runs('offline') for line in S.get_logs('offline', run) for name in line})))"
    )
    environment = {**environment_of_a_run(), "TRACKIO_DIR": str(database.parent)}
    return set(
        json.loads(
            subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, check=True).stdout
        )
    )


@pytest.mark.long
def test_supervised_fine_tuning(tmp_path):
    sections = {"base": str(TINY / "sft.yaml"), "name": "sft", "budget": {"tokens": 2048}}
    train_offline(sections, tmp_path, ["tensorboard"])
    assert calls_outside(tmp_path) == []
