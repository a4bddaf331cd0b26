"""The commands that the README and the Makefile give for the shipped recipes, with a model and documents of this
machine."""

import shlex
import subprocess
import sys

import pytest
from launching import ROOT, environment_of_a_run, losses
from tiny_checkpoints import save_llama

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
SMALL = [
    "data.sequence_length=64",
    "budget={tokens: 1_024, global_batch_tokens: 256}",
    "schedule={name: constant}",
    "checkpoints={every_steps: 4}",
    "evaluation={}",
    "training.per_device_train_batch_size=2",
    "training.gradient_accumulation_steps=auto",
    "training.logging_steps=1",
    "training.use_cpu=true",
]


@pytest.mark.parametrize(
    ("target", "launcher", "changes"),
    [
        ("train-prototype", "accelerate", ["training.deepspeed=null", "--lora"]),
        ("train-production", "torchrun", ["training.bf16=false"]),
    ],
)
def test_make_starts_a_shipped_recipe(
    target, launcher, changes, corpus, tokenizer_folder, tmp_path
):
    model = save_llama(tmp_path / "model", tokenizer_folder, seed=1)
    here = [
        f"output_dir={tmp_path}/runs",
        f"model={{path: {model}}}",
        f"data={{sources: [{{path: {corpus}}}]}}",
    ]
    arguments = shlex.join([*here, *SMALL, *changes, "name=small"])
    made = ["make", "--dry-run", "--no-print-directory", target, f"VENV={sys.prefix}", "GPUS=2"]
    made += [f"--old-file={sys.prefix}/.installed", f"ARGS={arguments}"]
    printed = subprocess.run(made, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    command = shlex.split(printed.splitlines()[-1])
    assert command[0].endswith(launcher)
    ended = subprocess.run(
        command, cwd=ROOT, env=environment_of_a_run(), capture_output=True, text=True, timeout=600
    )
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    assert len(losses(tmp_path / "runs/small")) == 4
    adapters = list((tmp_path / "runs/small").rglob("adapter_config.json"))
    assert bool(adapters) == ("--lora" in changes)
