"""Callbacks: what they see, what they write, and that none of them changes the training."""

import gzip
import io
import json
import re
from functools import partial
from types import SimpleNamespace

import pytest
import tiny_watchers
import torch
from rich.console import Console
from rich.text import Text
from tiny_trainers import events, metrics, same, trainer_of, weights
from tiny_watchers import SEEN
from transformers import TrainerControl, TrainerState, TrainingArguments
from transformers.integrations import TensorBoardCallback

from cpt.errors import DataError, RecipeError
from cpt.formatting import format_duration
from cpt.recipe.schema import Monitoring
from cpt.runs.events import read_events
from cpt.runs.folder import read_metrics
from cpt.runs.record import Run
from cpt.training import callbacks as module
from cpt.training.callbacks import (
    SECONDS_BETWEEN_WRITES,
    Alert,
    ConsoleProgress,
    Cost,
    MetricsFile,
    StatusFile,
    StepProfile,
    Tracker,
    Watch,
    build_callbacks,
    check_callbacks,
    check_profiled_steps,
    describe_logs,
    guard_trackers,
    order_of,
    usable_trackers,
)


@pytest.fixture
def trained(tiny_recipe, tmp_path):
    """A run of two steps with these callbacks."""
    SEEN.clear()

    def run(*callbacks):
        trainer = trainer_of(
            {**tiny_recipe, "monitoring": {"callbacks": list(callbacks)}}, tmp_path, steps=2
        )
        trainer.train()
        return trainer

    return run


def messages(trainer, kind):
    return [event["message"] for event in read_events(trainer.run_folder) if event["kind"] == kind]


@pytest.mark.heavy
def test_a_function_sees_all_figures_and_its_sentences_are_alerts(trained):
    trainer = trained({"name": "tiny_watchers:note", "above": 0.0})
    lines = metrics(trainer)[:2]
    assert SEEN[:2] == [{name: float(value) for name, value in line.items()} for line in lines]
    assert messages(trainer, "alert") == [f"The loss is {line['loss']:.3f}." for line in lines]


@pytest.mark.heavy
def test_a_class_may_add_figures_and_end_the_run(trained):
    trainer = trained({"name": "tiny_watchers:Adds", "metric": "seven", "stop_at": 1})
    assert read_metrics(trainer.run_folder).curve("seven")[1].tolist()[:1] == [7.0]
    assert trainer.state.global_step == 1


@pytest.mark.heavy
def test_one_that_fails_costs_an_event_and_is_not_called_again(trained):
    failing = ["tiny_watchers:fails", "tiny_watchers:answers_a_number", "tiny_watchers:AddsTensor"]
    trainer = trained(*failing, "tiny_watchers:note")
    found = messages(trainer, "callback_failed")
    assert len(found) == 3 and all(
        name in message for name, message in zip(failing, found, strict=True)
    )
    assert "KeyError: 'x'" in found[0] and "`odd`" in found[2]
    assert trainer.state.global_step == 2 and len(SEEN) == 3
    assert "odd" not in read_metrics(trainer.run_folder).names


@pytest.mark.heavy
def test_an_error_that_is_meant_for_the_user_ends_the_run(trained):
    with pytest.raises(DataError, match="this is meant"):
        trained("tiny_watchers:refuses")


@pytest.mark.heavy
@pytest.mark.parametrize(
    "name",
    [
        "transformers:DefaultFlowCallback",
        "transformers:PrinterCallback",
        "transformers:ProgressCallback",
        "trl:RichProgressCallback",
    ],
)
def test_a_callback_of_hugging_face_works_as_in_its_trainer(trained, name):
    check_callbacks(Monitoring.model_validate({"callbacks": [name]}).callbacks)
    trainer = trained(name)
    assert trainer.state.global_step == 2 and messages(trainer, "callback_failed") == []


@pytest.mark.heavy
def test_the_states_of_callbacks_continue_in_a_resumed_run(tiny_recipe, tmp_path):
    """Two of one class have a state each."""
    sections = {
        **tiny_recipe,
        "monitoring": {"callbacks": ["tiny_watchers:Counts", "tiny_watchers:Counts"]},
    }
    first = trainer_of(sections, tmp_path, steps=4, checkpoints={"every_steps": 2})
    first.train()
    resumed = trainer_of(sections, tmp_path, steps=4)
    resumed.train(first.run_folder / "checkpoint-2")
    counted = [line["counted"] for line in metrics(resumed) if "loss" in line]
    assert counted == [1, 2, 3, 4]  # the first two are of the first start
    states = [callback.state() for callback in callbacks_of(resumed, "tiny_watchers:Counts")]
    assert states == [{"args": {}, "attributes": {"steps": 4}}] * 2


def callbacks_of(trainer, name):
    handler = trainer.callback_handler
    return [one for one in handler.callbacks if type(one).__name__.startswith(name)]


@pytest.mark.parametrize(
    ("callback", "named"),
    [
        ("transformers:EarlyStoppingCallback", "`evaluation.stop: {set: NAME, patience: 3}`"),
        ("tiny_watchers:Patient", "`evaluation.stop: {set: NAME, patience: 3}`"),
        ("trl:BEMACallback", "`checkpoints.average`"),
        ("trl:LogCompletionsCallback", "`evaluation.prompts`"),
        ("trl:WeaveCallback", "`evaluation.prompts`"),
        ("trl:SyncRefModelCallback", "Remove it"),
        ("trl.experimental.merge_model_callback:MergeModelCallback", "cpt merge"),
        ("costs", "`cost`"),
        ("cost", "`dollars_per_gpu_hour`"),
        ({"name": "alert", "metric": "loss"}, "`above`"),
        ({"name": "tiny_watchers:note", "abov": 1}, "`above`"),
        ("tiny_watchers:NoCallback", "TrainerCallback"),
    ],
)
def test_mistakes_are_found_before_the_run(callback, named):
    with pytest.raises(RecipeError) as refused:
        check_callbacks(Monitoring.model_validate({"callbacks": [callback]}).callbacks)
    assert named in str(refused.value) and "monitoring.callbacks[0]" in str(refused.value)


def alerts_of(folder, values, **bounds):
    """(kind, step) of the events that these gradient norms cause."""
    alert = Alert(folder, metric="grad_norm", **bounds)
    for step, value in enumerate(values, start=1):
        state = TrainerState(global_step=step, is_world_process_zero=True)
        alert.on_log(
            None,
            state,
            TrainerControl(),
            logs={"other": 1.0} if value is None else {"grad_norm": value},
        )
    alert.on_train_end(
        None, TrainerState(global_step=9, is_world_process_zero=True), TrainerControl()
    )
    return [(event["kind"], event["step"]) for event in read_events(folder)]


def test_each_crossing_of_a_bound_is_one_alert(tmp_path):
    assert alerts_of(tmp_path, [1, 11, 12, None, 13, 2, 14], above=10) == [
        ("alert", 2),
        ("alert", 7),
    ]


@pytest.mark.parametrize(
    ("value", "alerts"), [(0.5, 1), (1.0, 0), (5.0, 0), (5.1, 1), (float("nan"), 1), ("text", 0)]
)
def test_bounds_are_inclusive_and_nan_is_beyond_them(value, alerts, tmp_path):
    assert len(alerts_of(tmp_path, [value], above=5.0, below=1.0)) == alerts


# --- all at once ---

FIGURES = """
    loss loss_smoothed grad_norm learning_rate epoch tokens tokens_per_second data_wait step_seconds_p50
    step_seconds_p95 share_domain share_general tokens_domain tokens_general loss_domain loss_general host_memory_gib
    cpu_percent cost
"""
WATCHING = ("cpt.training.callbacks", "cpt.training.metrics", "cpt.training.source_losses")
ALL = {
    "profile": 2,
    "callbacks": [
        {"name": "cost", "dollars_per_gpu_hour": 2.5},
        {"name": "alert", "metric": "loss", "above": 0.1},
        {"name": "tiny_watchers:note", "above": 0.0},
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "fused", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["logits", "fused loss"]
)
def test_watching_changes_no_weight(fused, tiny_recipe, tmp_path):
    # dropout: random numbers that a watcher draws would be missed
    config = {**tiny_recipe["model"]["config"], "attention_dropout": 0.3}
    recipe = {
        **tiny_recipe,
        "model": {**tiny_recipe["model"], "fused_loss": fused, "config": config},
    }
    watched = trainer_of({**recipe, "monitoring": ALL}, tmp_path / "watched")
    alone = trainer_of(recipe, tmp_path / "alone")
    handler = alone.callback_handler
    handler.callbacks = [one for one in handler.callbacks if type(one).__module__ not in WATCHING]
    for trainer in (watched, alone):
        torch.manual_seed(7)
        trainer.train()
    assert same(weights(watched), weights(alone))
    assert set().union(*metrics(watched)) >= {*FIGURES.split()}
    assert not (alone.run_folder / "metrics.jsonl").exists()
    assert events(watched, "profile") == [("profile", 2)]
    assert_three_steps_are_traced(watched.run_folder / "profile" / "steps-2-4.json.gz")


def assert_three_steps_are_traced(file):
    with gzip.open(file) as content:
        trace = json.load(content)["traceEvents"]
    names = [event.get("name", "") for event in trace if event.get("cat") == "user_annotation"]
    assert len([name for name in names if name.startswith("ProfilerStep#")]) == 3
    assert "aten::mm" in file.with_name("steps-2-4.txt").read_text()


@pytest.mark.parametrize(
    ("at_step", "begin", "products"), [(1, 0, 1 + 2 + 3), (2, 0, 2 + 3 + 4), (4, 1, 4 + 5 + 6)]
)
def test_three_steps_are_traced_from_the_given_one_on(at_step, begin, products, tmp_path):
    profiled, arguments = (
        StepProfile(tmp_path, at_step),
        SimpleNamespace(device=torch.device("cpu")),
    )
    for step in range(begin, 8):
        state = TrainerState(global_step=step, is_world_process_zero=True)
        profiled.on_step_begin(arguments, state, TrainerControl())
        for _ in range(step + 1):  # as many products as the step's number
            torch.ones(3, 5) @ torch.ones(5, 7)
        state.global_step += 1
        profiled.on_step_end(arguments, state, TrainerControl())
    profiled.on_train_end(arguments, state, TrainerControl())
    file = tmp_path / "profile" / f"steps-{at_step}-{at_step + 2}.json.gz"
    with gzip.open(file) as content:
        names = [event.get("name", "") for event in json.load(content)["traceEvents"]]
    assert names.count("aten::mm") == products
    assert "aten::mm" in file.with_name(f"steps-{at_step}-{at_step + 2}.txt").read_text()
    (event,) = read_events(tmp_path)
    assert (event["kind"], event["step"]) == ("profile", at_step)
    assert f"Steps {at_step} to {at_step + 2}: profiled: {file} " in event["message"]


@pytest.mark.parametrize("steps", [range(4, 8), range(2)], ids=["too late", "too short"])
def test_steps_that_were_not_profiled_are_an_event_of_the_main_process(steps, tmp_path):
    for is_main, kinds in ((False, []), (True, [("profile_left_out", 2)])):
        profiled, arguments = StepProfile(tmp_path, 2), SimpleNamespace(device=torch.device("cpu"))
        for step in steps:
            state = TrainerState(global_step=step, is_world_process_zero=is_main)
            profiled.on_step_begin(arguments, state, TrainerControl())
            state.global_step += 1
            profiled.on_step_end(arguments, state, TrainerControl())
        profiled.on_train_end(arguments, state, TrainerControl())
        assert [(event["kind"], event["step"]) for event in read_events(tmp_path)] == kinds
        assert not (tmp_path / "profile").exists() and profiled.profiler is None


def test_steps_that_the_run_does_not_have_cannot_be_profiled():
    check_profiled_steps(7, steps=9)
    with pytest.raises(RecipeError, match="monitoring.profile"):
        check_profiled_steps(8, steps=9)


# --- trackers ---


class Recorder(TensorBoardCallback):
    """A tracker that records its calls, and fails while it has a problem."""

    def __init__(self):
        self.logged, self.calls, self.problem, self.wait = {}, [], None, None

    def __getattribute__(self, name):
        if name.startswith("on_"):
            return lambda args, state, control, **kwargs: self.hear(name, state, **kwargs)
        return super().__getattribute__(name)

    def hear(self, call, state, logs=None, **_):
        self.calls.append(call)
        if self.wait is not None:
            self.wait()
        if self.problem is not None:
            raise self.problem
        if call == "on_log":
            self.logged.setdefault(state.global_step, {}).update(logs)


@pytest.mark.heavy
def test_trackers_get_what_other_callbacks_add_to_the_logs(tiny_recipe, tmp_path, monkeypatch):
    recorder = Recorder()
    monkeypatch.setattr(
        "transformers.trainer.get_reporting_integration_callbacks", lambda _: [recorder]
    )
    trainer_of(tiny_recipe, tmp_path, steps=2).train()
    assert {"tokens_per_second", "data_wait", "share_domain", "loss"} <= recorder.logged[2].keys()
    assert {"on_train_begin", "on_log", "on_train_end"} <= {*recorder.calls}


@pytest.mark.parametrize("problem", [ConnectionError, RuntimeError, ImportError])
def test_a_tracker_that_fails_costs_one_event_and_is_tried_again_after_a_pause(tmp_path, problem):
    recorder, state = Recorder(), TrainerState(global_step=1)
    recorder.problem = problem("the service is away")
    tracker = Tracker(recorder, "tensorboard", tmp_path)
    for call in (tracker.on_train_begin, tracker.on_log, tracker.on_train_end):
        call(None, state, TrainerControl(), logs={"loss": 1.0})
    (event,) = read_events(tmp_path)
    assert event["kind"] == "tracker_failed" and "the service is away" in event["message"]
    assert recorder.calls == ["on_train_begin", "on_train_end"]
    recorder.problem, tracker.paused_until = None, 0.0
    tracker.on_log(None, state, TrainerControl(), logs={"loss": 2.0})
    assert recorder.logged == {1: {"loss": 2.0}}


def test_a_tracker_that_waited_long_pauses_for_twenty_times_as_long(tmp_path, monkeypatch):
    """And each log that fails after one that did not is another event."""
    recorder, state, now = Recorder(), TrainerState(global_step=1), [1000.0]
    monkeypatch.setattr("cpt.training.callbacks.time", SimpleNamespace(monotonic=lambda: now[0]))
    tracker = Tracker(recorder, "tensorboard", tmp_path)

    def log_after(seconds):
        now[0] += seconds
        recorder.calls.clear()
        tracker.on_log(None, state, TrainerControl(), logs={})
        return recorder.calls == ["on_log"]

    for waited, pause in ((1.0, 60.0), (9.0, 180.0)):
        recorder.tb_writer = "broken"
        recorder.problem, recorder.wait = ConnectionError("away"), partial(pass_by, now, waited)
        assert log_after(0) and recorder.tb_writer is None
        recorder.problem, recorder.wait = None, None
        assert not log_after(pause - 0.5) and log_after(1.0)
    assert [event["kind"] for event in read_events(tmp_path)] == ["tracker_failed"] * 2


def pass_by(now, seconds):
    now[0] += seconds


def test_a_tracker_that_cannot_be_imported_is_left_out_with_a_warning(caplog):
    assert usable_trackers(["tensorboard", "comet_ml"]) == ["tensorboard"]
    (record,) = caplog.records
    assert record.event == "tracker_failed" and "comet_ml" in record.message


# --- files of the run, and the console ---


def test_the_status_has_the_step_and_the_last_checkpoint(tmp_path):
    run = Run(tmp_path)
    status = StatusFile(run)
    status.on_save(None, TrainerState(global_step=3, max_steps=9), TrainerControl())
    assert "checkpoint" not in run.status(), "the save failed"
    (tmp_path / "checkpoint-4").mkdir()
    status.on_save(None, TrainerState(global_step=4, max_steps=9), TrainerControl())
    assert (run.status()["state"], run.status()["step"], run.status()["checkpoint"]) == (
        "running",
        4,
        "checkpoint-4",
    )
    status.on_log(None, TrainerState(global_step=5, max_steps=9), TrainerControl())
    assert run.status()["step"] == 4, "it is written once a second"
    status.written -= SECONDS_BETWEEN_WRITES
    status.on_log(None, TrainerState(global_step=5, max_steps=9), TrainerControl())
    assert (run.status()["step"], run.status()["steps"]) == (5, 9)


def test_metrics_after_the_checkpoint_are_cut_and_only_the_main_process_writes(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for begin, is_main, kept in ((0, True, []), (2, True, [1, 2]), (2, False, [1, 2, 3, 4, 5])):
        path.write_text("".join(json.dumps({"step": step}) + "\n" for step in (1, 2, 3, 4, 5)))
        file = MetricsFile(path, 50)
        state = TrainerState(global_step=begin, max_steps=9, is_world_process_zero=is_main)
        arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, logging_steps=7)
        file.on_train_begin(arguments, state, TrainerControl())
        assert state.logging_steps == 7  # not that of the checkpoint
        state.global_step = 3
        file.on_log(None, state, TrainerControl(), logs={"loss": 0.5, "name": "x"})
        file.on_step_end(None, state, TrainerControl())
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        new = {"step": 3, "tokens": 150, "loss": 0.5, "name": "x"}
        assert lines == [{"step": step} for step in kept] + [new] * is_main


LOGS = {
    "loss": 2.34567,
    "reward": 0.12345,
    "rewards/accuracies": 0.75,
    "learning_rate": 0.00025,
    "grad_norm": 1.2345,
    "tokens_per_second": 12345.6,
    "mfu": 0.3456,
    "gpu_memory_peak_gib": 12.34,
    "host_memory_gib": 4.56,
    "cost": 1234.567,
    "epoch": 0.5,
    "margin": None,
}
OF_SETS = {
    "eval_texts_loss": 2.5,
    "eval_texts_bits_per_byte": 1.23456,
    "eval_pairs_loss": 0.6931,
    "eval_pairs_rewards/accuracies": 0.625,
    "eval_pairs_margin": 0.5,
    "eval_pairs_examples": 8,
    "eval_prompts_reward": 0.25,
    "eval_prompts_examples": 4,
}


def test_a_line_has_each_figure_in_its_form():
    assert describe_logs(LOGS) == (
        "loss 2.3457  reward 0.123  accuracy 0.75  learning rate 2.50e-04  gradient norm 1.23"
        "  12,346 tokens/s  MFU 34.6%  GPU 12.3 GiB  host 4.6 GiB  cost 1,234.57"
    )
    assert describe_logs(OF_SETS) == (
        "held out: texts 1.2346 bits per byte, pairs loss 0.6931 accuracy 0.625 margin 0.5,"
        " prompts reward 0.25"
    )
    assert describe_logs({"train_runtime": 3.5}) == ""


@pytest.mark.parametrize("is_terminal", [False, True])
def test_the_console_shows_lines_and_on_a_terminal_a_bar(is_terminal):
    output = io.StringIO()
    console = Console(file=output, width=150, force_terminal=is_terminal)
    callback = ConsoleProgress("demo", console)
    for is_main in (False, True):
        state = TrainerState(global_step=2, max_steps=7, is_world_process_zero=is_main)
        callback.on_train_begin(None, state, TrainerControl())
        for logs in (LOGS | {"seconds_to_go": 3900.0}, OF_SETS, {"train_runtime": 3.5}):
            callback.on_log(None, state, TrainerControl(), logs=logs)
        state.global_step = 5
        callback.on_step_end(None, state, TrainerControl())
        assert is_main or output.getvalue() == ""
        callback.on_train_end(None, state, TrainerControl())
    step, lines = "demo  step 2/7", output.getvalue().splitlines()
    if is_terminal:
        (bar,) = re.findall(r"demo .* 5/7 .*", Text.from_ansi(output.getvalue()).plain)
        assert bar.rstrip().endswith("loss 2.3457  12,346 tokens/s  MFU 34.6%  GPU 12.3 GiB")
        assert any(f"{step}  {describe_logs(OF_SETS)}" in line for line in lines)
    else:
        assert lines == [
            f"{step}  {format_duration(3900.0)} to go  {describe_logs(LOGS)}",
            f"{step}  {describe_logs(OF_SETS)}",
        ]


def test_a_console_that_cannot_be_written_ends_nothing():
    callback = ConsoleProgress("demo", Console(file=open("/dev/full", "w"), width=200))  # noqa: SIM115
    state = TrainerState(global_step=5, max_steps=10, is_world_process_zero=True)
    callback.on_log(None, state, TrainerControl(), logs={"loss": 2.0, "learning_rate": 0.1})
    with pytest.raises(OSError, match="No space left"):
        callback.console.file.flush()


# --- without a trainer -----------------------------------------------------------------------------------------------


def components(*callbacks):
    return Monitoring.model_validate({"callbacks": list(callbacks)}).callbacks


@pytest.mark.parametrize(
    ("is_main", "seen", "kinds"),
    [
        (True, {"a": 1, "loss": 2.0}, ["alert_without_metric"]),
        (True, {"grad_norm": 2.0, "loss": 2.0}, []),
        (True, {}, []),
        (False, {"a": 1, "loss": 2.0}, []),
    ],
)
def test_an_alert_on_what_was_never_logged_is_reported_at_the_end(is_main, seen, kinds, tmp_path):
    alert = Alert(tmp_path, metric="grad_norm", above=5.0)
    state = TrainerState(global_step=7, is_world_process_zero=is_main)
    if seen:
        alert.on_log(None, state, TrainerControl(), logs=seen)
    alert.on_train_end(None, state, TrainerControl())
    reported = read_events(tmp_path)
    assert [event["kind"] for event in reported] == kinds
    for event in reported:
        assert (event["step"], event["metric"]) == (7, "grad_norm")
        assert event["message"].endswith("grad_norm was never logged. Logged: a, loss.")


def test_an_alert_has_the_step_the_value_and_the_bound(tmp_path):
    alert = Alert(tmp_path, metric="loss", above=5.0, below=1.0)
    for step, value in ((3, 7.5), (4, 0.25), (5, 2.0), (6, 0.5)):
        state = TrainerState(global_step=step, is_world_process_zero=True)
        alert.on_log(None, state, TrainerControl(), logs={"loss": value})
    assert [
        (event["step"], event["metric"], event["value"], event["message"])
        for event in read_events(tmp_path)
    ] == [
        (3, "loss", "7.5", "Step 3: loss is 7.5, above 5."),
        (6, "loss", "0.5", "Step 6: loss is 0.5, below 1."),
    ]


def test_a_watching_function_is_checked_as_the_callbacks_after_it_are():
    good = {"name": "tiny_watchers:note", "above": 1.0}
    check_callbacks(components(good, "tiny_watchers:Counts"))
    with pytest.raises(RecipeError, match=r"monitoring.callbacks\[1\]"):
        check_callbacks(components(good, "tiny_watchers:NoCallback"))


@pytest.mark.parametrize("is_main", [True, False])
def test_a_function_gets_numbers_with_step_and_tokens_and_its_sentence_is_an_event(
    is_main, tmp_path
):
    calls = []

    def watch(figures, *, limit):
        calls.append((figures, limit))
        return "too slow" if figures["tokens"] > limit else ""

    watching = Watch(watch, {"limit": 500}, tmp_path, tokens_per_step=100)
    for step in (5, 7):
        state = TrainerState(global_step=step, is_world_process_zero=is_main)
        logs = {"loss": 2, "name": "text", "rate": 0.5}
        watching.on_log(None, state, TrainerControl(), logs=logs)
    alerts = [(event["kind"], event["step"], event["message"]) for event in read_events(tmp_path)]
    if not is_main:
        assert calls == alerts == []
    else:
        assert calls == [
            ({"loss": 2.0, "rate": 0.5, "step": step, "tokens": 100 * step}, 500) for step in (5, 7)
        ]
        assert alerts == [("alert", 7, "too slow")]
        watching.watch = lambda figures, limit: 3
        with pytest.raises(TypeError, match="expected a message .* or None, got int"):
            watching.on_log(None, state, TrainerControl(), logs={})


def test_callbacks_are_built_in_the_order_of_the_recipe_under_their_names(tmp_path):
    adds = {"name": "tiny_watchers:Adds", "metric": "mine"}
    built = build_callbacks(
        components(
            {"name": "cost", "dollars_per_gpu_hour": 2.5},
            adds,
            "tiny_watchers:note",
            {**adds, "stop_at": 3},
            {"name": "alert", "metric": "loss", "above": 3},
            adds,
            "tiny_watchers:Counts",
        ),
        tmp_path,
        256,
    )
    name = "tiny_watchers:Adds"
    assert [type(one).__name__ for one in built] == [
        *("Cost", name, "tiny_watchers:note", f"{name} 2", "Alert", f"{name} 3"),
        "tiny_watchers:Counts",
    ]
    assert isinstance(built[0], Cost) and (built[0].run, built[0].price) == (tmp_path, 2.5)
    assert (built[4].run, built[4].metric, built[4].above) == (tmp_path, "loss", 3)
    assert [one.callback.stop_at for one in (built[1], built[3], built[5])] == [99, 3, 99]
    assert (built[2].callback.tokens_per_step, built[2].callback.run) == (256, tmp_path)
    assert built[6].state()["attributes"] == {"steps": 0} and not hasattr(built[1], "state")


def test_a_callback_that_cannot_be_constructed_is_a_mistake_of_the_recipe(tmp_path, monkeypatch):
    class Fails(tiny_watchers.Adds):
        def __init__(self, problem: str) -> None:
            raise {"value": ValueError("odd"), "data": DataError("no such set")}[problem]

    monkeypatch.setattr(tiny_watchers, "Fails", Fails, raising=False)
    with pytest.raises(RecipeError, match="Fails cannot be constructed: ValueError: odd"):
        build_callbacks(
            components({"name": "tiny_watchers:Fails", "problem": "value"}), tmp_path, 1
        )
    with pytest.raises(DataError, match="^no such set$"):
        build_callbacks(components({"name": "tiny_watchers:Fails", "problem": "data"}), tmp_path, 1)


def test_what_a_full_disk_refuses_costs_a_warning(tmp_path, monkeypatch, caplog):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    file = MetricsFile(tmp_path / "metrics.jsonl", 50)
    monkeypatch.setattr(module, "keep_lines_until", full)
    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    state = TrainerState(global_step=2, max_steps=9, is_world_process_zero=True)
    file.on_train_begin(arguments, state, TrainerControl())
    profiled = StepProfile(tmp_path, 1)
    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", full)
    arguments = SimpleNamespace(device=torch.device("cpu"))
    for step in range(3):
        state.global_step = step
        profiled.on_step_begin(arguments, state, TrainerControl())
        state.global_step += 1
        profiled.on_step_end(arguments, state, TrainerControl())
    assert caplog.messages == [
        f"{tmp_path}/metrics.jsonl cannot be changed: No space left on device. It may contain some"
        " steps twice.",
        "The profile cannot be written: [Errno 28] No space left on device.",
    ]
    assert read_events(tmp_path) == [] and profiled.profiler is None


def test_lines_that_wait_for_the_disk_are_cut_too(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl", 50)
    file.lines.waiting = [json.dumps({"step": step}) + "\n" for step in (2, 3, 4)]
    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    state = TrainerState(global_step=3, max_steps=9, is_world_process_zero=True)
    file.on_train_begin(arguments, state, TrainerControl())
    assert [json.loads(line)["step"] for line in file.lines.waiting] == [2, 3]


def test_trackers_are_guarded_and_other_callbacks_stay(tmp_path):
    recorder = Recorder()
    status = StatusFile(Run(tmp_path))

    class Trainer:
        callback_handler = SimpleNamespace(callbacks=[status, recorder])

        def remove_callback(self, callback):
            self.callback_handler.callbacks.remove(callback)

        def add_callback(self, callback):
            self.callback_handler.callbacks.append(callback)

    guard_trackers(Trainer(), tmp_path)
    first, tracker = Trainer.callback_handler.callbacks
    assert first is status and isinstance(tracker, Tracker)
    assert (tracker.callback, tracker.name, tracker.run) == (recorder, "Recorder", tmp_path)
    assert (order_of(status), order_of(tracker)) == (0, 1)
