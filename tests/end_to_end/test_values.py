"""Losses and gradients of steps that two processes take together, by the formulas for those of one process."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from contrib.rl import test_values as of_rl
from launching import ROOT, environment_of_a_run
from stages import test_values as of_examples
from stages import test_values_of_samples as of_samples
from taken_steps import steps_on_examples
from tiny_generations import steps_on_samples
from tiny_rewards import WORDS

pytestmark = pytest.mark.slow
PROGRAM = Path(__file__).with_name("steps_of_two.py")
PAIRS = "dpo-sigmoid"
ONE = {"gradient_accumulation_steps": 1}
# Six answers in each process: the second group of four is in both.
CROSSING = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3}
CROSSING |= {"steps_per_generation": 3, "num_generations": 4, "num_iterations": 3}


def plan(folder: Path) -> list[tuple]:
    """(name, function, stage, rows, options) of each run; a step has the rows of one of a single process."""
    teacher, small = str(folder / "teacher"), str(folder / "small")
    stage, options = of_examples.options_of(PAIRS)
    runs = [(PAIRS, steps_on_examples, stage, [of_examples.pairs()], options)]
    conversations, unpacked = [of_examples.conversations()], {"data": of_examples.UNPACKED}
    for name, more in {"distill": {}, "gkd": {}, "gkd-sampled": {"lmbda": 1.0}}.items():
        stage = name.partition("-")[0]
        options = of_examples.taught_by(teacher, stage, 0.3) | unpacked | more
        runs.append((name, steps_on_examples, stage, conversations, options))
    rated = of_examples.KTO | {"seed": 3}
    runs.append(("kto", steps_on_examples, "kto", [of_examples.rated()], rated))
    halved = {**of_rl.ONES, "steps_per_generation": 2}
    # A budget in tokens that lasts one process for so many steps lasts two for half as many.
    sampled = {
        "grpo": {**of_samples.GROUPS, **CROSSING, **of_samples.keys_of("dapo"), "steps": 2 * 3},
        "rloo": {**of_samples.RLOO, **CROSSING, "steps": 2 * 3},
        "distill_on_policy": {"teacher_model_name_or_path": small, "beta": 0.3, "steps": 2},
        "ppo": {**halved, **of_rl.PPO, "steps": 2 * 4},
        "spo": {**halved, **of_rl.SPO, "steps": 2 * 8},
    }
    runs += [(name, steps_on_samples, name, [], keys) for name, keys in sampled.items()]
    return [(*run[:4], ONE | run[4]) for run in runs]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where both processes left what they saw."""
    folder = tmp_path_factory.mktemp("two")
    of_examples.save_teacher(folder / "teacher")
    of_examples.save_teacher(folder / "small", WORDS + 4)
    torch.save(plan(folder), folder / "plan.pt")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**environment_of_a_run(), "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    words = [sys.executable, str(PROGRAM), str(folder), str(port)]
    ended = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr[-6000:]
    return folder


@pytest.fixture
def taken(folder):
    """The steps of a run, with the micro-batches of both processes."""

    def read(name):
        first, second = (
            torch.load(folder / f"{name}-{rank}.pt", weights_only=False) for rank in range(2)
        )
        for step, other in zip(first.steps, second.steps, strict=True):
            assert step.loss == other.loss
            step.micro_batches += other.micro_batches
        return first

    return read


def test_pairs(taken):
    of_examples.check_pairs(PAIRS, taken(PAIRS))


def test_rated_answers_share_the_divergence_of_all_processes(taken):
    first, second = of_examples.check_rated(taken("kto"), together=True)
    assert first == second > 0


@pytest.mark.parametrize("stage", ["distill", "gkd"])
def test_a_teacher(stage, taken, tmp_path):
    teacher = of_examples.save_teacher(tmp_path)
    temperature = 0.8 if stage == "distill" else 1.0
    of_examples.check_taught(taken(stage), teacher, 0.3, temperature)


def test_answers_that_gkd_samples(taken, tmp_path):
    of_examples.check_sampled_by_gkd(taken("gkd-sampled"), of_examples.save_teacher(tmp_path))


def test_groups_of_answers_in_both_processes(taken):
    of_samples.check_grpo("dapo", taken("grpo"), parts=1, uses=3)
    of_samples.check_rloo(taken("rloo"), parts=1, uses=3)


def test_distillation_on_policy(taken, tmp_path):
    teacher = of_examples.save_teacher(tmp_path, WORDS + 4)
    of_samples.check_on_policy(taken("distill_on_policy"), teacher, 0.3)


def test_single_answers(taken):
    of_rl.check_ppo(taken("ppo"), masks=False, whitens=True)
    of_rl.check_spo(taken("spo"))
