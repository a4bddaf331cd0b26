"""A run of local files connects to no other machine, also without HF_HUB_OFFLINE: Python's audit hook listens in each
process, and strace where it is installed."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
from launching import BIN, ROOT, environment_of_a_run
from tiny import TINY_LLAMA, write_recipe
from tiny_tasks import TINY
from transformers import AutoConfig, AutoModelForCausalLM

# Each Python process imports this when it starts, and writes down where it connects to.
EAR = """
import json, os, sys

def hear(event, arguments):
    if event in ("socket.connect", "socket.sendto", "socket.sendmsg", "socket.getaddrinfo", "socket.gethostbyname"):
        where = arguments[0] if event in ("socket.getaddrinfo", "socket.gethostbyname") else arguments[1]
        with open(os.environ["HEARD"], "a") as file:
            file.write(json.dumps([event, repr(where), sys.argv[:2]]) + "\\n")

sys.addaudithook(hear)
"""
ON_THIS_MACHINE = re.compile(r"127\.\d+\.\d+\.\d+|'::1'|'localhost'|'0\.0\.0\.0'|^'[/\\]|^b?'\\x00|^None$|^b?'/")
OF_STRACE = re.compile(r"sa_family=AF_INET6?, .*?(?:inet_addr\(\"|inet_pton\(AF_INET6, \")([^\"]+)\"")
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


def listening(folder, words, environment):
    """The command and its environment, with both listeners."""
    (folder / "ear").mkdir()
    (folder / "ear" / "sitecustomize.py").write_text(EAR)
    path = os.pathsep.join(filter(None, [str(folder / "ear"), environment.get("PYTHONPATH")]))
    environment = {**environment, "PYTHONPATH": path, "HEARD": str(folder / "heard.jsonl")}
    strace, trace = shutil.which("strace"), str(folder / "strace.txt")
    traced = (
        [strace, "-f", "--seccomp-bpf", "-qq", "-e", "trace=connect,sendto,sendmsg", "-o", trace] if strace else []
    )
    return [*traced, *words], environment


def outside(folder):
    """Connections to other machines; a socket in the file system is none."""
    heard = folder / "heard.jsonl"
    calls = [json.loads(line) for line in heard.read_text().splitlines()] if heard.exists() else []
    found = [f"{event} {where} {program}" for event, where, program in calls if not ON_THIS_MACHINE.search(where)]
    trace = folder / "strace.txt"
    for line in trace.read_text(errors="replace").splitlines() if trace.exists() else ():
        address = OF_STRACE.search(line)
        if address and not address.group(1).startswith(("127.", "::1", "0.0.0.0", "::ffff:127.")):
            found.append(line)
    return found


def run_heard(sections, folder, trackers):
    """Train in a process of its own, and listen."""
    monitoring = {
        "trackers": trackers,
        "project": "heard",
        "callbacks": [{"name": "cost", "dollars_per_gpu_hour": 1.0}],
    }
    sections = {**sections, "output_dir": str(folder / "runs"), "monitoring": monitoring}
    recipe = write_recipe(sections, folder / "recipe.yaml")
    environment = {name: value for name, value in environment_of_a_run().items() if name != "HF_HUB_OFFLINE"}
    environment |= {"WANDB_MODE": "offline", "WANDB_DIR": str(folder), "TRACKIO_DIR": str(folder / "trackio")}
    words, environment = listening(folder, [str(BIN / "cpt"), "train", str(recipe)], environment)
    ended = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return folder / "runs" / sections["name"]


@pytest.mark.slow
def test_continued_training_with_three_trackers(tiny_recipe, tmp_path):
    pytest.importorskip("wandb")
    pytest.importorskip("trackio")
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**TINY_LLAMA)).save_pretrained(tmp_path / "base")
    sections = {
        **tiny_recipe,
        "stage": "cpt",
        "model": {"path": str(tmp_path / "base")},
        "evaluation": {"held_out_share": 0.2},
    }
    run = run_heard(sections, tmp_path, ["tensorboard", "wandb", "trackio"])
    assert outside(tmp_path) == [] and "wandb" in (tmp_path / "heard.jsonl").read_text(), "whose socket is a file"
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
    assert shown <= in_trackio(tmp_path / "trackio" / "heard.db")
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
        " S.get_runs('heard') for line in S.get_logs('heard', run) for name in line})))"
    )
    environment = {**environment_of_a_run(), "TRACKIO_DIR": str(database.parent)}
    return set(
        json.loads(
            subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, check=True).stdout
        )
    )


@pytest.mark.long
def test_a_stage_of_answers(tmp_path):
    sections = {"base": str(TINY / "sft.yaml"), "name": "sft", "budget": {"tokens": 2048}}
    run_heard(sections, tmp_path, ["tensorboard"])
    assert outside(tmp_path) == []


@pytest.mark.parametrize("family", ["AF_INET", "AF_INET6"])
def test_who_is_called_is_heard(family, tmp_path):
    address = {"AF_INET": ("192.0.2.1", 9), "AF_INET6": ("2001:db8::1", 9)}[
        family
    ]  # of documentation: nobody is there
    call = f"""
import socket
with socket.socket(socket.{family}, socket.SOCK_DGRAM) as line:
    try:
        line.connect({address})
    except OSError:
        pass
"""
    words, environment = listening(tmp_path, [sys.executable, "-c", call], environment_of_a_run())
    subprocess.run(words, env=environment, check=True)
    assert address[0] in outside(tmp_path)[0]


def test_whom_one_finds_on_the_same_machine_is_not_outside(tmp_path):
    call = (
        "import socket; line = socket.socket(); line.connect_ex(('127.0.0.1', 9)); socket.getaddrinfo('localhost', 9)"
    )
    words, environment = listening(tmp_path, [sys.executable, "-c", call], environment_of_a_run())
    subprocess.run(words, env=environment, check=True)
    assert outside(tmp_path) == [] and len((tmp_path / "heard.jsonl").read_text().splitlines()) == 2
