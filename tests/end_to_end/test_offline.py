"""A run on local files connects to nothing outside this machine, even where nothing says that it is offline."""

import json
import os
import re
import subprocess
import sys

import pytest
from launching import BIN, ROOT, environment_of_a_run
from tiny import TINY_LLAMA, write_recipe
from transformers import AutoConfig, AutoModelForCausalLM

pytestmark = pytest.mark.slow
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
ON_THIS_MACHINE = re.compile(
    r"127\.\d+\.\d+\.\d+|'::1'|'localhost'|'0\.0\.0\.0'|^'[/\\]|^b?'\\x00|^None$|^b?'/"
)


def calls_outside(words, folder, variables=()):
    """Run a command that is not said to be offline, and return its network calls that leave this machine."""
    (folder / "audit").mkdir()
    (folder / "audit" / "sitecustomize.py").write_text(AUDIT)
    (folder / "calls.jsonl").touch()
    environment = {
        name: value for name, value in environment_of_a_run().items() if name != "HF_HUB_OFFLINE"
    }
    path = os.pathsep.join(filter(None, [str(folder / "audit"), environment.get("PYTHONPATH")]))
    environment |= {
        **dict(variables),
        "PYTHONPATH": path,
        "NETWORK_CALLS": str(folder / "calls.jsonl"),
    }
    ended = subprocess.run(
        words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    calls = [json.loads(line) for line in (folder / "calls.jsonl").read_text().splitlines()]
    return [address for _, address, _ in calls if not ON_THIS_MACHINE.search(address)]


def test_the_audit_sees_a_call_outside_and_ignores_one_on_this_machine(tmp_path):
    program = (
        "import socket; socket.socket().connect_ex(('127.0.0.1', 9)); socket.getaddrinfo('localhost', 9);"
        "socket.socket(type=socket.SOCK_DGRAM).connect_ex(('192.0.2.1', 9))"  # an address for documentation
    )
    assert calls_outside([sys.executable, "-c", program], tmp_path) == ["('192.0.2.1', 9)"]


def test_continued_pretraining_with_three_trackers(tiny_recipe, tmp_path):
    pytest.importorskip("wandb")
    pytest.importorskip("trackio")
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**TINY_LLAMA)).save_pretrained(
        tmp_path / "base"
    )
    tiny_recipe |= {
        "stage": "cpt",
        "model": {"path": str(tmp_path / "base")},
        "evaluation": {"held_out_share": 0.2},
    }
    tiny_recipe["monitoring"] = {"trackers": ["tensorboard", "wandb", "trackio"]}
    tiny_recipe["training"] |= {"project": "offline"}
    recipe = write_recipe(tiny_recipe, tmp_path / "recipe.yaml")
    variables = {
        "WANDB_MODE": "offline",
        "WANDB_DIR": str(tmp_path),
        "TRACKIO_DIR": str(tmp_path / "trackio"),
    }
    assert calls_outside([str(BIN / "cpt"), "train", str(recipe)], tmp_path, variables) == []
    assert "wandb" in (tmp_path / "calls.jsonl").read_text(), "its socket is a file"
    assert (tmp_path / "trackio" / "offline.db").exists()
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    content = file.read_bytes()
    for name in ("train/loss", "train/tokens", "train/share_domain", "eval/domain_loss"):
        assert name.encode() in content and name in figures_in_tensorboard(
            tmp_path / "runs" / "tiny"
        ), name


def figures_in_tensorboard(run):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    accumulators = [
        reader.EventAccumulator(str(folder)).Reload() for folder in (run / "runs").iterdir()
    ]
    return {tag for accumulator in accumulators for tag in accumulator.Tags()["scalars"]}
