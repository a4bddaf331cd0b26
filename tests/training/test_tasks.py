"""Tasks during training: what is evaluated, what a failure costs, what a resumed run repeats, and that training does
not change."""

import json
import random
import shutil
from types import SimpleNamespace

import pytest
import torch
import yaml
from launching import launch_to_its_end
from run_folders import write_lines
from tiny import WORDS, write_recipe
from tiny_run import save_checkpoint, seal
from tiny_trainers import events, metrics, published, trainer_of
from transformers import TrainerControl, TrainerState

from cpt.checkpoints.resume import latest_checkpoint
from cpt.errors import Interrupted, RecipeError
from cpt.recipe.schema import Evaluation
from cpt.runs.events import read_events
from cpt.training import tasks
from cpt.training.arguments import RunLength

pytestmark = pytest.mark.heavy
GOOD = "print('progress'); print('{\"task_mine_acc\": 0.25}')"


@pytest.fixture
def trainer(tiny_recipe, tmp_path, monkeypatch):
    """A trainer of four steps, whose tasks are evaluated after every second one by a program of the test."""

    def made(program=GOOD, *, steps=4, **changes):
        (tmp_path / "program.py").write_text(program)
        monkeypatch.setattr(tasks, "PROGRAM", tmp_path / "program.py")
        evaluation = {"tasks": ["mine"], "tasks_every_tokens": 512}
        return trainer_of(tiny_recipe, tmp_path, steps=steps, evaluation=evaluation, **changes)

    return made


def scores(trainer):
    """(step, tokens, score) of the lines of tasks."""
    lines = [line for line in metrics(trainer) if any(name.startswith("task_") for name in line)]
    return [(line["step"], line["tokens"], line["task_mine_acc"]) for line in lines]


def test_scores_have_the_step_of_their_weights_which_are_removed(trainer, tiny_recipe, tmp_path):
    run, without = trainer(), trainer_of(tiny_recipe, tmp_path / "without", steps=4)
    for one in (run, without):
        one.train()
    losses = [[line["loss"] for line in metrics(one) if "loss" in line] for one in (run, without)]
    assert losses[0] == losses[1] and len(losses[0]) == 4
    assert (4, 1024, 0.25) in scores(run) and published(run) == ["checkpoint-4"]


@pytest.mark.slow
def test_steps_wait_and_the_oldest_of_too_many_is_skipped(trainer, monkeypatch):
    monkeypatch.setattr(tasks, "MOST_WAITING", 1)
    run = trainer("import time; time.sleep(2)\n" + GOOD, steps=8)
    run.train()
    assert [step for step, *_ in scores(run)] == [2, 8]
    assert events(run) == [("tasks_skipped", 4), ("tasks_skipped", 6)] and published(run) == [
        "checkpoint-8"
    ]


@pytest.mark.slow
def test_on_the_gpu_of_the_run_training_waits_for_each(trainer, monkeypatch):
    monkeypatch.setattr(tasks.TaskEvaluations, "on_own_gpu", True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    of_gpu = "float(os.environ['CUDA_VISIBLE_DEVICES'])"
    run = trainer(
        f"import json, os, time; time.sleep(1); print(json.dumps({{'task_mine_acc': {of_gpu}}}))",
        steps=8,
    )
    run.train()
    assert [(step, gpu) for step, _, gpu in scores(run)] == [(step, 5.0) for step in (2, 4, 6, 8)]


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("raise ValueError('no data')", "exit code 1: ValueError: no data."),
        ("import os; os.abort()", "exit code -6: "),
        ("import time; time.sleep(500)", "killed after 0.5 s, exit code -9: "),
    ],
)
def test_a_task_that_crashes_or_takes_too_long_costs_an_event(trainer, program, said, monkeypatch):
    if "sleep" in program:
        monkeypatch.setattr(tasks, "LONGEST_SECONDS", 0.5)
    run = trainer(program)
    run.train()
    assert run.state.global_step == 4 and scores(run) == [] and published(run) == ["checkpoint-4"]
    assert (
        events(run)[-1] == ("tasks_failed", 4)
        and f"were not evaluated: {said}" in read_events(run.run_folder)[-1]["message"]
    )
    assert run.tasks.child is None


def test_weights_of_due_steps_are_linked_or_copied_once(tmp_path, monkeypatch):
    evaluation = Evaluation(tasks=["exam"], tasks_every_tokens=512)
    length = RunLength(8, 4, 1, tokens_per_step=256, micro_batch=4)
    unused = dict.fromkeys(("checkpointer", "check_signals", "report"))
    device = torch.device("cpu")
    waiting = tasks.TaskEvaluations(tmp_path, evaluation, length, device=device, **unused)
    assert [step for step in range(7) if waiting.is_due(step)] == [2, 4, 6]
    saved = tmp_path / "checkpoint"
    (saved / "more").mkdir(parents=True)
    for name in ("model.safetensors", "more/config.json"):
        (saved / name).write_text(name)
    waiting.on_published(saved, 2)
    waiting.on_published(saved, 3)

    def refuse(source, target, **_):
        raise OSError("no hard links")

    monkeypatch.setattr(tasks.os, "link", refuse)
    waiting.on_published(saved, 4)
    (saved / "model.safetensors").write_text("of a later step")
    waiting.on_published(saved, 4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "tasks-2", "tasks-4"]
    for step, weights in ((2, "of a later step"), (4, "model.safetensors")):
        folder = tmp_path / f"tasks-{step}"
        assert (folder / "model.safetensors").read_text() == weights
        assert (folder / "more/config.json").read_text() == "more/config.json"


def interrupted():
    raise Interrupted("stopped by SIGTERM")


def test_a_run_that_stops_ends_the_evaluation_and_keeps_its_weights(trainer):
    run = trainer("import time; time.sleep(500)")
    run.call_prediction_step = interrupted
    run.train()
    assert run.tasks.child is None and published(run) == ["checkpoint-4", "tasks-2", "tasks-4"]


@pytest.mark.slow
def test_a_resumed_run_evaluates_what_is_missing_and_repeats_nothing(trainer):
    saved = {"every_steps": 2, "keep": None}
    run = trainer(checkpoints=saved)
    run.train()
    folder = run.run_folder
    lines = [line for line in metrics(run) if "task_mine_acc" not in line]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for step in (2, 4):  # as if it had been killed
        shutil.copytree(folder / f"checkpoint-{step}", folder / f"tasks-{step}")
    shutil.rmtree(folder / "checkpoint-4")
    resumed = trainer("import time; time.sleep(0.5)\n" + GOOD, checkpoints=saved)
    resumed.train(resume_from_checkpoint=latest_checkpoint(folder))
    assert [step for step, *_ in scores(resumed)] == [2, 4]
    again = trainer("raise ValueError", checkpoints=saved)
    again.train(resume_from_checkpoint=latest_checkpoint(folder))
    assert [step for step, *_ in scores(again)] == [2, 4] and events(again) == []


def write_exam(folder):
    """A task of lm-eval whose questions a tiny model answers differently after each step."""
    draw, folder = random.Random(0), folder / "exam"
    folder.mkdir()
    questions = [
        {
            "question": " ".join(draw.choices(WORDS, k=6)),
            "choices": draw.sample(WORDS, 4),
            "answer": number % 4,
        }
        for number in range(40)
    ]
    (folder / "questions.jsonl").write_text(
        "".join(json.dumps(question) + "\n" for question in questions)
    )
    task = {
        "task": "exam",
        "dataset_path": "json",
        "test_split": "test",
        "output_type": "multiple_choice",
    }
    task |= {"dataset_kwargs": {"data_files": {"test": str(folder / "questions.jsonl")}}}
    task |= {
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "answer",
    }
    (folder / "exam.yaml").write_text(yaml.safe_dump({**task, "metric_list": [{"metric": "acc"}]}))
    return folder


@pytest.mark.slow
def test_scores_of_two_processes_are_those_of_cpt_evaluate(cpt, tiny_recipe, tmp_path):
    pytest.importorskip("lm_eval")
    folder = write_exam(tmp_path)
    evaluation = {"tasks": [{"name": "exam", "folder": str(folder)}], "tasks_every_tokens": 4 * 256}
    changes = {"evaluation": evaluation, "checkpoints": {"weights_every_steps": 4, "keep": None}}
    launch_to_its_end(
        write_recipe({**tiny_recipe, **changes}, tmp_path / "tested.yaml"), processes=2
    )
    run = tmp_path / "runs" / "tiny"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = {line["step"]: line["task_exam_acc"] for line in lines if "task_exam_acc" in line}
    assert found.keys() == {4, 8}
    code, printed = cpt(
        "evaluate", run / "weights-4", "--task", "exam", "--task-folder", folder, "--json"
    )
    (score,) = json.loads(printed[printed.index("{\n") : printed.rindex("}") + 1])["tasks"]
    assert code == 0 and score["value"] == found[4]


# --- without a trainer -----------------------------------------------------------------------------------------------


def evaluations(folder, *, every=2, device="cpu", on="auto", check_signals=lambda: None):
    """The tasks of a run of eight steps of 256 tokens, whose saves are written at once."""
    folder.mkdir(exist_ok=True)
    checkpointer = SimpleNamespace(wait=lambda: None, is_writing=False)
    ours = tasks.TaskEvaluations(
        folder,
        Evaluation(tasks=["mine"], tasks_every_tokens=256 * every, tasks_device=on),
        RunLength(8, 4, 1, tokens_per_step=256, micro_batch=4),
        device=torch.device(device),
        checkpointer=checkpointer,
        check_signals=check_signals,
        report=None,
    )
    ours.begin = lambda step=0, **about: ours.on_train_begin(
        None, TrainerState(global_step=step, **about), TrainerControl()
    )
    return ours


def save_weights(folder, *steps):
    for step in steps:
        weights = save_checkpoint(folder, step, sealed=False).rename(folder / f"tasks-{step}")
        (weights / "trainer_state.json").unlink()
        seal(weights, step, kind="weights")


@pytest.mark.parametrize(("on", "gpus", "fits"), [("cuda:3", 3, False), ("cuda:3", 4, True)])
def test_a_gpu_that_the_machine_lacks_is_refused_by_each_process(
    on, gpus, fits, tmp_path, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    ours = evaluations(tmp_path, on=on)
    if fits:
        ours.begin(is_world_process_zero=False)
    else:
        with pytest.raises(RecipeError, match="tasks_device`: this machine has 3 GPUs"):
            ours.begin(is_world_process_zero=False)


@pytest.mark.parametrize("is_main", [True, False])
def test_a_start_evaluates_the_weights_up_to_its_step_that_have_no_scores(is_main, tmp_path):
    save_weights(tmp_path, 2, 4, 6, 8)
    (tmp_path / "tasks-5").mkdir()  # half written
    lines = [
        {"step": 2, "loss": 1.0},
        {"step": 4, "loss": 1.0},
        {"step": 4, "task_mine_acc": 0.5},
        {"step": 6, "loss": 1.0},
    ]
    write_lines(tmp_path / "metrics.jsonl", lines)
    ours = evaluations(tmp_path)
    ours.begin(6, is_world_process_zero=is_main)
    assert ours.first_step == 6
    names = sorted(path.name for path in tmp_path.glob("tasks-*"))
    if is_main:
        assert [path.name for path in ours.waiting] == names == ["tasks-2", "tasks-6"]
    else:
        assert ours.waiting == [] and len(names) == 5


@pytest.mark.parametrize(("free", "most", "left"), [(5000, 8, 3), (4999, 8, 1), (5000, 2, 2)])
def test_weights_are_skipped_where_many_wait_or_the_disk_gets_full(
    free, most, left, tmp_path, monkeypatch
):
    """The disk has room for ten times the largest weights that wait, of 500 bytes."""
    monkeypatch.setattr(tasks, "MOST_WAITING", most)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**6, 0, free))
    ours = evaluations(tmp_path, every=2)
    for step, size in ((2, 300), (4, 500)):
        (tmp_path / f"tasks-{step}").mkdir()
        (tmp_path / f"tasks-{step}" / "weights").write_bytes(bytes(size))
        ours.waiting.append(tmp_path / f"tasks-{step}")
    ours.first_step = 8
    for step in (6, 7, 8):
        ours.add(step)
    waiting = [tmp_path / f"tasks-{step}" for step in (2, 4, 6)]
    assert ours.waiting == waiting[-left:]
    skipped = [2, 4][: 3 - left]
    skips = [(one["kind"], one["step"], one["message"]) for one in read_events(tmp_path)]
    assert skips == [
        (
            "tasks_skipped",
            step,
            f"The tasks of step {step} are skipped, because those of step 6 are due.",
        )
        for step in skipped
    ]
    assert [path.name for path in sorted(tmp_path.glob("tasks-*"))] == [
        path.name for path in waiting[-left:-1]
    ]


@pytest.mark.parametrize(
    ("device", "on", "waits"),
    [("cuda", "auto", [0, 2, 4]), ("cuda", "cpu", []), ("cpu", "auto", [])],
)
def test_training_waits_only_for_evaluations_on_its_own_gpu(device, on, waits, tmp_path):
    ours = evaluations(tmp_path, device=device, on=on)
    heard = {"wait": [], "advance": []}
    ours.wait = lambda control: heard["wait"].append(state.global_step)
    ours.advance = lambda: heard["advance"].append(state.global_step)
    for step in range(5):
        state = TrainerState(global_step=step)
        ours.on_step_begin(None, state, TrainerControl())
    others = [step for step in range(5) if step not in waits]
    assert heard == {"wait": waits, "advance": others}
    assert [path.name for path in ours.waiting] == ["tasks-2", "tasks-4"]
    for is_main in (False, True):
        state = TrainerState(global_step=6, is_world_process_zero=is_main)
        ours.on_train_end(None, state, TrainerControl())
        assert (ours.folder / "tasks-6" in ours.waiting) is is_main
    assert heard["wait"] == [*waits, 6, 6]


@pytest.mark.parametrize(
    ("on", "device", "visible", "gpu"),
    [
        ("cpu", "cuda", "4,5,7", ""),
        ("auto", "cpu", "4,5,7", ""),
        ("cuda:2", "cuda", "4,5,7", "7"),
        ("cuda:2", "cpu", None, "2"),
        ("auto", "cuda", "4,5,7", "5"),
        ("auto", "cuda", None, "1"),
    ],
)
def test_an_evaluation_sees_one_gpu_by_the_machines_number(
    on, device, visible, gpu, tmp_path, monkeypatch
):
    freed = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: freed.append("cache"))
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert evaluations(tmp_path, device=device, on=on).visible_gpu() == gpu
    assert freed == (["cache"] if (device, on) == ("cuda", "auto") else [])


class Child:
    def __init__(self):
        self.ended = 0

    def kill_family(self):
        self.ended += 1


def test_a_signal_while_training_waits_saves_stops_and_ends_the_evaluation(tmp_path):
    ours = evaluations(tmp_path, check_signals=interrupted)
    child = ours.child = Child()
    ours.waiting = [tmp_path / "tasks-2"]
    control = TrainerControl()
    ours.wait(control)
    assert control.should_save and control.should_training_stop
    assert (child.ended, ours.child, ours.waiting) == (1, None, [])


def test_an_evaluation_that_cannot_be_started_is_an_event(tmp_path):
    ours = evaluations(tmp_path)
    save_weights(tmp_path, 2, 4)

    def start():
        raise OSError("no more processes")

    ours.start = start
    ours.waiting = [tmp_path / "tasks-2", tmp_path / "tasks-4"]
    ours.checkpointer.is_writing = True
    assert ours.advance() is True and len(ours.waiting) == 2
    ours.checkpointer.is_writing = False
    assert [ours.advance(), ours.advance(), ours.advance()] == [True, False, False]
    assert [
        (one["kind"], one["step"], one["message"].partition(": ")[2])
        for one in read_events(tmp_path)
    ] == [
        ("tasks_failed", step, "OSError: no more processes. See tasks.log of the run.")
        for step in (2, 4)
    ]
    assert not list(tmp_path.glob("tasks-*"))


def test_an_evaluation_is_killed_after_its_time_and_not_before(tmp_path, monkeypatch):
    monkeypatch.setattr(tasks.time, "monotonic", lambda: 100.0)
    ours = evaluations(tmp_path)
    ours.child = SimpleNamespace(poll=lambda: None)
    read = []
    ours.read_result = lambda: read.append(ours.ends)
    for ends in (100.5, 100.0, 99.5):
        ours.ends = ends
        assert ours.advance() is True
    assert read == [99.5]


def test_an_evaluation_may_take_two_hours_and_sees_no_launcher(tmp_path, monkeypatch):
    started = []

    def child(command, **how):
        started.append((command, how))
        return Child()

    monkeypatch.setattr(tasks.time, "monotonic", lambda: 100.0)
    monkeypatch.setattr(tasks, "Child", child)
    ours = evaluations(tmp_path, on="cpu")
    ours.waiting = [tmp_path / "tasks-2", tmp_path / "tasks-4"]
    assert ours.advance() is True and ours.ends == 100 + 7200
    ((command, how),) = started
    assert command[1:] == [str(tasks.PROGRAM), str(tmp_path / "tasks-2")]
    assert how["environment"] == {"CUDA_VISIBLE_DEVICES": "", "PYTHONSAFEPATH": "1"}
    assert how["output"].name == str(tmp_path / "tasks.log")
    assert not {"RANK", "WORLD_SIZE"} & how["inherits"].keys()
    ours.child.poll = lambda: None
    assert ours.advance() is True and len(started) == 1, "one after the other"
