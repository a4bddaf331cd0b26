"""Metrics of a log: speed, time left, cost, utilisation of the machine, and the loss of each source."""

import json
import random
import time
from collections import Counter
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from threads_as_ranks import on_ranks
from tiny_models import tiny_model
from tiny_trainers import metrics, trainer_of
from torch.nn import functional as F
from transformers import TrainerControl, TrainerState

from cpt.data.rows.loader import CPTDataLoader
from cpt.data.rows.mixture import RowsOfSteps
from cpt.hardware import GIB, known_gpu
from cpt.hf_internals import IGNORED
from cpt.models.fused_loss import FusedLoss, OwnLoss
from cpt.models.inventory import build_on_meta, flops_per_token
from cpt.recipe.schema import Model
from cpt.runs.events import LastHeartbeat, write_heartbeat
from cpt.runs.folder import read_metrics
from cpt.training import metrics as module
from cpt.training import source_losses as losses_module
from cpt.training.metrics import (
    Cost,
    MachineUse,
    ModelFlopsUtilization,
    RealisedShares,
    SmoothedLoss,
    TrainingClock,
    peak_flops,
)
from cpt.training.source_losses import SourceLosses

TWO_GPUS = SimpleNamespace(world_size=2, n_gpu=1)
CPU, GPU = (SimpleNamespace(device=torch.device(name), world_size=3) for name in ("cpu", "cuda"))


def logged(callback, arguments=None, *, is_main=True, **figures):
    """A log with the metrics that the callback adds to it."""
    logs = figures or {"loss": 1.0}
    state = TrainerState(is_world_process_zero=is_main)
    callback.on_log(arguments, state, TrainerControl(), logs=logs, train_dataloader=None)
    return logs


@pytest.fixture
def now(monkeypatch):
    """The clock: a list with its time."""
    time_now = [100.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: time_now[0]))
    return time_now


def test_the_speed_excludes_evaluation_and_saving(now):
    clock, state = TrainingClock(tokens_per_step=1000), TrainerState(max_steps=4)
    clock.on_train_begin(None, state, TrainerControl())
    for event in (clock.on_evaluate, clock.on_save):
        state.global_step += 1
        now[0] += 2
        clock.on_step_end(None, state, TrainerControl())
        now[0] += 100
        event(None, state, TrainerControl())
    clock.on_log(None, state, TrainerControl(), logs=(logs := {"loss": 1.0}), train_dataloader=None)
    assert logs["tokens_per_second"] == 500 and logs["tokens"] == 2000 and state.epoch == 0.5


def test_a_log_has_the_speed_the_wait_and_the_quantiles_of_the_steps_since_the_last(now):
    clock, state = TrainingClock(tokens_per_step=700), TrainerState(max_steps=30)
    loader = object.__new__(CPTDataLoader)
    loader.waited_seconds, found = 0.0, []
    clock.on_train_begin(None, state, TrainerControl())
    for steps in ((1.0, 2.0, 9.0), (4.0,), (3.0, 5.0)):
        for seconds in steps:
            now[0] += seconds
            state.global_step += 1
            loader.waited_seconds += seconds / 4
            clock.on_step_end(None, state, TrainerControl(), train_dataloader=loader)
        logs = {"loss": 1.0}
        clock.on_log(None, state, TrainerControl(), logs=logs, train_dataloader=loader)
        names = ("tokens", "tokens_per_second", "data_wait", "step_seconds_p50", "step_seconds_p95")
        found.append([logs[name] for name in names])
        clock.on_log(
            None,
            state,
            TrainerControl(),
            logs=(other := {"eval_loss": 1.0}),
            train_dataloader=loader,
        )
        assert other == {"eval_loss": 1.0}
    every = [1.0, 2.0, 9.0, 4.0, 3.0, 5.0]
    assert found == [
        [700 * n, round(700 * k / s, 1), 0.25, *np.quantile(every[:n], (0.5, 0.95)).round(6)]
        for n, k, s in ((3, 3, 12), (4, 1, 4), (6, 2, 8))
    ]


@pytest.mark.parametrize(("share", "warnings"), [(0.5, 1), (0.001, 0)])
def test_a_run_that_waits_for_its_data_is_warned_once(share, warnings, now, caplog):
    clock, state = TrainingClock(tokens_per_step=1), TrainerState(max_steps=9999)
    loader = object.__new__(CPTDataLoader)
    loader.waited_seconds = 0.0
    clock.on_train_begin(None, state, TrainerControl())
    for _ in range(3 * module.LAST_STEPS):
        now[0] += 2.0
        loader.waited_seconds += 2.0 * share
        state.global_step += 1
        clock.on_step_end(None, state, TrainerControl(), train_dataloader=loader)
        is_early = state.global_step < module.LAST_STEPS
        assert len(caplog.records) == (0 if is_early else warnings)
    assert all(
        f"data 50.0% of the last {module.LAST_STEPS} steps" in text for text in caplog.messages
    )


def test_the_time_left_is_that_of_the_steps_so_far_without_the_first(now):
    clock, state = TrainingClock(tokens_per_step=1), TrainerState(max_steps=10)
    clock.on_train_begin(None, state, TrainerControl())
    found = []
    for step, seconds in (
        (3, 100.0),
        (4, 2.0),
        (5, 4.0),
        (4, 3.0),
    ):  # resumed at 2; the last is after a roll-back
        now[0] += seconds
        state.global_step = step
        clock.on_step_end(None, state, TrainerControl())
        clock.on_log(
            None, state, TrainerControl(), logs=(logs := {"loss": 1.0}), train_dataloader=None
        )
        found.append(logs.get("seconds_to_go"))
    assert found == [None, 12.0, 15.0, 18.0]


def smoothed(losses, history=()):
    callback = SmoothedLoss()
    callback.on_train_begin(
        None, TrainerState(log_history=[{"loss": loss} for loss in history]), TrainerControl()
    )
    return [logged(callback, loss=loss).get("loss_smoothed") for loss in losses]


def test_each_loss_weighs_nine_tenths_of_the_next_in_a_smoothed_one():
    assert smoothed([4.0, 2.0, 1.0]) == pytest.approx(
        [4.0, (0.9 * 4 + 2) / 1.9, (0.81 * 4 + 0.9 * 2 + 1) / 2.71]
    )


def test_a_resumed_run_smooths_as_if_it_had_never_stopped():
    assert smoothed([5.0, 6.0], history=[4.0, 2.0, 1.0]) == smoothed([4.0, 2.0, 1.0, 5.0, 6.0])[3:]


def test_the_cost_is_that_of_all_gpus(tmp_path, now):
    callback = Cost(tmp_path, dollars_per_gpu_hour=2.5)
    callback.on_train_begin(TWO_GPUS, TrainerState(is_world_process_zero=True), TrainerControl())
    now[0] += 1800
    found = logged(callback, TWO_GPUS, loss=1.0, seconds_to_go=7200)
    assert (found["cost"], found["cost_to_go"]) == (2.5, 10.0)


@pytest.mark.parametrize(("step", "before"), [(40, 7.0), (0, 0.0)], ids=["resumed", "begun anew"])
def test_the_cost_of_earlier_starts_counts_even_where_their_steps_were_lost(
    step, before, tmp_path, now
):
    lines = [
        {"step": 50, "tokens": 5, "cost": 6.5},
        {"step": 60, "tokens": 6, "cost": 7.0},
        {"step": 60, "tokens": 6, "eval_loss": 1.0},
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n{half a li")
    callback = Cost(tmp_path, dollars_per_gpu_hour=1)
    callback.on_train_begin(
        TWO_GPUS, TrainerState(global_step=step, is_world_process_zero=True), TrainerControl()
    )
    now[0] += 1800
    assert logged(callback, TWO_GPUS)["cost"] == before + 1.0


# --- the machine ---


@pytest.fixture
def machine(tmp_path):
    callback = MachineUse(tmp_path)
    callback.on_train_begin(None, TrainerState(), TrainerControl())
    return callback


@pytest.fixture
def gpu(monkeypatch):
    memory = {
        "allocated_bytes.all.current": 2,
        "reserved_bytes.all.current": 5,
        "allocated_bytes.all.peak": 4,
    }
    monkeypatch.setattr(
        torch.cuda, "memory_stats", lambda: {name: size * GIB for name, size in memory.items()}
    )
    for name, value in {"temperature": 61, "power_draw": 423_500, "utilization": 97}.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)


def test_the_main_process_adds_the_machines_use_to_logs_of_the_training_loss(machine):
    assert logged(machine, CPU, is_main=False) == {"loss": 1.0}
    assert logged(machine, CPU, eval_loss=1.0) == {"eval_loss": 1.0}
    figures = logged(machine, CPU)
    assert 0 <= figures["cpu_percent"] <= 100 and figures["host_memory_gib"] > 0.01


@pytest.mark.parametrize("has_disks", [True, False])
def test_traffic_is_per_second_and_without_loopback(machine, monkeypatch, has_disks):
    def count(seconds):
        moved = 2**20 * seconds
        disks = SimpleNamespace(read_bytes=moved, write_bytes=2 * moved)
        link = SimpleNamespace(bytes_recv=3 * moved, bytes_sent=4 * moved)
        links = {"lo": SimpleNamespace(bytes_recv=9**9 * moved, bytes_sent=0), "eth0": link}
        monkeypatch.setattr(psutil, "disk_io_counters", lambda: disks if has_disks else None)
        monkeypatch.setattr(psutil, "net_io_counters", lambda pernic: links)
        monkeypatch.setattr(time, "monotonic", lambda: float(seconds))

    count(10)
    machine.on_train_begin(None, TrainerState(), TrainerControl())
    count(20)
    traffic = {
        name.removesuffix("_mib_per_second"): value
        for name, value in logged(machine, CPU).items()
        if name.endswith("_mib_per_second")
    }
    disks = {"disk_read": 1.0, "disk_written": 2.0} if has_disks else {}
    assert traffic == disks | {"network_received": 3.0, "network_sent": 4.0}


def test_the_peak_of_gpu_memory_is_the_largest_of_all_processes(machine, tmp_path, gpu):
    for rank, peak in enumerate((4.0, 7.5, None, 9.0)):  # the fourth is of an earlier start
        write_heartbeat(tmp_path, LastHeartbeat(rank, 1, "h", "training", 1, 1, None, peak))
    memory = {
        "gpu_memory_allocated_gib": 2.0,
        "gpu_memory_reserved_gib": 5.0,
        "gpu_memory_peak_gib": 7.5,
    }
    for _ in range(2):  # at each log
        assert logged(machine, GPU).items() >= memory.items()


@pytest.mark.heavy
def test_mfu_is_the_operations_of_real_tokens_over_the_peak(tiny_recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "peak_flops", lambda *_: 1e9)
    monkeypatch.setattr(module, "ROWS_MEASURED", 100)
    tiny_recipe["data"]["packing"] = "none"  # rows with padding, which is not counted
    trainer = trainer_of(tiny_recipe, tmp_path, steps=2)
    trainer.train()
    lengths = np.concatenate([trainer.rows.documents_in(row) for row in range(100)])
    of_token = flops_per_token(
        build_on_meta(trainer.model.config), (lengths**2).sum() / lengths.sum()
    )
    found = read_metrics(trainer.run_folder)
    speed, filled = found.curve("tokens_per_second")[1], lengths.sum() / (100 * 64)
    assert found.curve("mfu")[1] == pytest.approx(speed * filled * of_token / 1e9, rel=0.02)


# --- the loss of each source ---


@pytest.fixture
def two_sources(tiny_recipe, tmp_path):
    """A source that repeats one word, and one of random letters; each row of a step is another source's."""
    draw = random.Random(1)
    words = {
        "easy": lambda: ["the"] * 60,
        "hard": lambda: draw.choices("abcdefghijklmnopqrstuvwxyz0123456789", k=60),
    }
    for name, choose in words.items():
        lines = [json.dumps({"text": " ".join(choose()) + f" {number}"}) for number in range(60)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    tiny_recipe["data"]["sources"] = [{"path": str(tmp_path / f"{name}.jsonl")} for name in words]
    return tiny_recipe


def looks_at(begin, end, *, every, accumulation=3, first=False):
    """(step, micro-batch) that are measured."""
    looks = SourceLosses(SimpleNamespace(sources=["a"]), SimpleNamespace())
    arguments = SimpleNamespace(gradient_accumulation_steps=accumulation, logging_first_step=first)
    found = []
    for step in range(begin, end + 1):
        state = TrainerState(global_step=step - 1, logging_steps=every)
        looks.on_step_begin(arguments, state, TrainerControl())
        if looks.is_measuring:
            found.append((step, looks.measured))
    return found


def test_one_random_step_of_each_log_is_measured_the_same_one_after_a_resume():
    found = looks_at(1, 80, every=5)
    assert [(step - 1) // 5 for step, _ in found] == [*range(16)]
    assert {(step - 1) % 5 for step, _ in found} == {*range(5)}
    assert {micro_batch for _, micro_batch in found} == {*range(3)}
    assert looks_at(43, 80, every=5) == [one for one in found if one[0] >= 43]
    assert looks_at(1, 80, every=5, first=True) == sorted(
        {*found, (1, looks_at(1, 1, every=1)[0][1])}
    )
    assert [step for step, _ in looks_at(1, 7, every=1)] == [*range(1, 8)]


def by_hand(trainer, rows):
    """The mean over the tokens of each source's rows, one row at a time."""
    losses = {"loss_easy": [], "loss_hard": []}
    for number in rows:
        row, source = trainer.rows[number], ("loss_easy", "loss_hard")[trainer.rows.turn(number)[0]]
        with torch.no_grad():
            logits = trainer.model(
                input_ids=row["input_ids"][None], position_ids=row["position_ids"][None]
            ).logits[0]
        of_tokens = F.cross_entropy(
            logits[:-1], row["labels"][1:], ignore_index=IGNORED, reduction="none"
        )
        losses[source] += of_tokens[row["labels"][1:] != IGNORED].tolist()
    return {name: sum(values) / len(values) for name, values in losses.items()}


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("fused", "micro_batch"),
    [(False, 4), (True, 4), (False, 1), (True, 1)],
    ids=["logits", "fused loss", "logits one by one", "fused loss one by one"],
)
def test_each_source_has_the_loss_of_its_rows(fused, micro_batch, two_sources, tmp_path):
    two_sources["model"]["fused_loss"] = fused
    two_sources["training"]["per_device_train_batch_size"] = micro_batch
    trainer = trainer_of(two_sources, tmp_path, steps=1)
    assert isinstance(trainer.model.loss_function, FusedLoss) == fused
    trainer.model.eval()
    expected = by_hand(trainer, range(4))
    trainer.train()
    first = metrics(trainer)[0]
    assert {name: first[name] for name in expected} == pytest.approx(expected, rel=1e-4)
    tokens = Counter()
    for number in range(4):
        source = ("easy", "hard")[trainer.rows.turn(number)[0]]
        tokens[source] += int(trainer.rows.documents_in(number).sum())
    assert {name: first[f"tokens_{name}"] for name in tokens} == pytest.approx(tokens, abs=2)
    total = sum(first[f"tokens_{name}"] for name in tokens)
    for name in tokens:
        assert first[f"share_{name}"] == pytest.approx(first[f"tokens_{name}"] / total, abs=0.01)


def test_processes_that_share_rows_measure_the_same_ones():
    looks = SourceLosses(
        SimpleNamespace(sources=["a"]), SimpleNamespace(first=lambda step: 100), sharing_rows=2
    )
    looks.state, looks.micro_batch = SimpleNamespace(global_step=5), 1
    seen = []
    for rank in range(4):
        looks.args = SimpleNamespace(
            per_device_train_batch_size=3, world_size=4, process_index=rank
        )
        seen.append(looks.rows_under_way())
    assert seen == [range(106, 109)] * 2 + [range(109, 112)] * 2


# --- the utilization of GPUs, without one ----------------------------------------------------------------------------

H100 = "NVIDIA H100 80GB HBM3"


def test_the_peak_of_a_gpu_is_that_of_its_data_sheet():
    half = peak_flops(H100, "half")
    assert half == 1e12 * known_gpu(H100).tflops("half") > 1e14
    assert peak_flops(H100, "tf32") == 1e12 * known_gpu(H100).tflops("tf32") < half
    assert peak_flops(None, "half") is None and peak_flops("a GPU", "half") is None


class Rows:
    """Rows of 8 tokens, of which the first six are documents of 1, 2 and 3."""

    def __init__(self):
        self.asked = []

    def documents_in(self, row):
        self.asked.append(row)
        return np.array([1, 2, 3])


def utilization(model, **arguments):
    """The callback of a run that resumes after step 5, with a stand-in for the data."""
    rows = Rows()
    filled = []

    def share(end, *, first):
        filled.append((first, end))
        return 0.75

    data = SimpleNamespace(rows=rows, filled=share)
    callback = ModelFlopsUtilization(data, RowsOfSteps(3), H100, Model(path="some/model"))
    flags = {"bf16": False, "fp16": False, "tf32": None, "world_size": 1, "n_gpu": 1}
    state = TrainerState(global_step=5, is_world_process_zero=arguments.pop("is_main", True))
    callback.on_train_begin(
        SimpleNamespace(**flags | arguments), state, TrainerControl(), model=model
    )
    return callback, state, filled


@pytest.mark.parametrize(
    ("flags", "dtype", "precision"),
    [
        ({}, torch.float32, "fp32"),
        ({"tf32": True}, torch.float32, "tf32"),
        ({"bf16": True, "tf32": True}, torch.float32, "half"),
        ({"fp16": True}, torch.float32, "half"),
        ({}, torch.bfloat16, "half"),
        ({}, torch.float16, "half"),
    ],
)
def test_the_peak_is_that_of_the_precision_in_which_the_model_computes(
    flags, dtype, precision, monkeypatch
):
    asked = []
    monkeypatch.setattr(module, "peak_flops", lambda gpu, kind: asked.append((gpu, kind)))
    layer = torch.nn.Linear(3, 5).to(dtype)
    layer.codes = torch.nn.Parameter(torch.ones(2).byte(), requires_grad=False)
    callback, *_ = utilization(torch.nn.Sequential(torch.nn.Identity(), layer), **flags)
    assert asked == [(H100, precision)] and callback.peak is None
    utilization(layer, is_main=False)
    assert len(asked) == 1


@pytest.mark.parametrize(("processes", "gpus", "count"), [(1, 0, 1), (3, 1, 3), (1, 2, 2)])
def test_the_utilization_of_all_gpus_since_the_last_log(processes, gpus, count, monkeypatch):
    monkeypatch.setattr(module, "peak_flops", lambda gpu, kind: 1e6)
    model = tiny_model("llama")
    callback, state, filled = utilization(model, world_size=processes, n_gpu=gpus)
    assert callback.data.rows.asked == [*range(15, 15 + 32)]
    of_token = flops_per_token(build_on_meta(model.config), (1 + 4 + 9) / 6)
    for step in (7, 8):
        state.global_step = step
        logs = {"tokens_per_second": 100.0}
        callback.on_log(None, state, TrainerControl(), logs=logs)
        expected = 100 * 0.75 * of_token / (1e6 * count)
        assert logs["mfu"] == pytest.approx(expected, abs=1e-4) and logs["mfu"] > 0.01
    assert filled == [(15, 21), (21, 24)]
    callback.on_log(None, state, TrainerControl(), logs=(other := {"eval_loss": 1.0}))
    assert other == {"eval_loss": 1.0}


def test_a_model_whose_operations_cannot_be_counted_has_no_utilization(monkeypatch, caplog):
    monkeypatch.setattr(module, "peak_flops", lambda gpu, kind: 1e6)
    caplog.set_level("INFO", logger="cpt")
    callback, state, _ = utilization(torch.nn.Linear(3, 5))
    callback.on_log(None, state, TrainerControl(), logs=(logs := {"tokens_per_second": 100.0}))
    assert logs == {"tokens_per_second": 100.0} and callback.peak is None
    assert "mfu is not logged: cannot count the operations" in caplog.text


@pytest.mark.parametrize("has_driver", [True, False])
def test_figures_of_the_driver_are_read_until_it_does_not_answer(machine, monkeypatch, has_driver):
    machine.has_nvml = has_driver
    calls = []

    def utilization():
        calls.append("asked")
        if len(calls) == 3:
            raise RuntimeError("no answer")
        return 97

    for name, value in {"temperature": 61, "power_draw": 423_500}.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(torch.cuda, "utilization", utilization)
    figures = {
        "gpu_temperature_celsius": 61,
        "gpu_power_watts": 423.5,
        "gpu_utilization_percent": 97,
    }
    expected = [figures, figures, {}, {}] if has_driver else [{}] * 4
    assert [machine.gpu_state() for _ in range(4)] == expected
    assert len(calls) == (3 if has_driver else 0)


def test_the_machine_is_looked_at_every_thirty_seconds(machine, monkeypatch):
    seconds = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: seconds[0])
    seen = []
    for now in (1000.0, 1029.5, 1030.0, 1059.0, 1060.5):
        seconds[0] = now
        seen.append("host_memory_gib" in logged(machine, CPU))
    assert seen == [True, False, True, False, True]


def test_shares_are_those_of_the_tokens_of_each_source_so_far():
    sources = [SimpleNamespace(name=name) for name in ("a", "b", "c")]
    counted = {21: {"a": 60, "b": 30, "c": 10}}

    def shares(data, step):
        state = TrainerState(global_step=step)
        callback = RealisedShares(data, RowsOfSteps(3))
        callback.on_log(None, state, TrainerControl(), logs=(logs := {"loss": 1.0}))
        return logs

    one = SimpleNamespace(sources=sources[:1], tokens=None)
    assert shares(one, 7) == {"loss": 1.0} == shares(SimpleNamespace(sources=sources), 0)
    layout = SimpleNamespace(is_one_a_row=False)
    data = SimpleNamespace(
        sources=sources,
        tokens=lambda rows: counted[rows],
        chunked=[SimpleNamespace(layout=layout)],
    )
    logs = shares(data, 7)
    assert {name: logs[f"share_{name}"] for name in "abc"} == {"a": 0.6, "b": 0.3, "c": 0.1}
    assert {name: logs[f"tokens_{name}"] for name in "abc"} == counted[21]
    layout.is_one_a_row = True
    assert shares(data, 7).keys() == {"loss", "share_a", "share_b", "share_c"}


def test_the_loss_of_a_source_is_the_mean_over_the_tokens_of_all_processes():
    sources = [SimpleNamespace(name=name) for name in ("a", "b", "c", "d")]

    def log(rank):
        looks = SourceLosses(SimpleNamespace(sources=sources), SimpleNamespace())
        looks.take(0, torch.tensor(6.0 * rank), torch.tensor(rank))  # the first has no tokens of it
        looks.take(1, torch.tensor(float("inf") if rank == 1 else 1.0), torch.tensor(2))
        looks.take(3, torch.tensor(1.0), torch.tensor(2))
        looks.take(3, torch.tensor(2.0 + rank), torch.tensor(3))
        logs = {"loss": 1.0}
        arguments = SimpleNamespace(world_size=3)
        looks.on_log(arguments, TrainerState(), TrainerControl(), logs={"eval_loss": 1.0})
        looks.on_log(arguments, TrainerState(), TrainerControl(), logs=logs)
        assert looks.totals.abs().sum() == 0
        return logs

    for logs in on_ranks(3, log):
        assert logs == pytest.approx({"loss": 1.0, "loss_a": 6.0, "loss_d": 12 / 15})


@pytest.mark.parametrize("tokens_at_once", [1, 2, 100])
def test_the_loss_of_a_row_is_known_only_from_its_logits(tokens_at_once, monkeypatch):
    monkeypatch.setattr(losses_module, "BYTES_AT_ONCE", 12 * 7 * tokens_at_once)
    model = torch.nn.Module()
    model.loss_function = F.cross_entropy
    draw = torch.Generator().manual_seed(3)
    logits = torch.randn(3, 5, 7, generator=draw)
    targets = torch.randint(7, (3, 5), generator=draw)
    targets[1, 2:] = IGNORED
    loss_of_row = losses_module.loss_of_rows(model, logits, targets)
    for row in range(3):
        expected = F.cross_entropy(logits[row], targets[row], ignore_index=IGNORED, reduction="sum")
        assert loss_of_row(row) == pytest.approx(expected)
    assert losses_module.loss_of_rows(model, None, targets) is None
    assert losses_module.loss_of_rows(model, logits[:2], targets) is None
    assert losses_module.loss_of_rows(model, logits[:, :4], targets) is None


def test_the_mean_loss_has_neither_smoothed_labels_nor_penalties():
    model = tiny_model("llama")
    loss = torch.tensor(3.0)
    mean = losses_module.mean_cross_entropy
    assert mean(model, {"loss": loss}) is loss and mean(model, {}) is None
    assert mean(model, {"loss": loss, "aux_loss": torch.tensor(1.0)}) is None
    own = OwnLoss(model)
    own.memory.last = torch.tensor(2.0)
    assert float(mean(model, {"loss": loss, "aux_loss": torch.tensor(1.0)})) == 2.0
    own.memory.last = None
    assert mean(model, {"loss": loss}) is loss
    own.smoothing = 0.1
    assert mean(model, {"loss": loss}) is None


@pytest.mark.parametrize(
    ("inputs", "training", "measuring", "expected"),
    [
        ({"labels": [[9, 1, 2, 3]]}, True, True, [1, 2, 3, IGNORED]),
        ({"labels": [[9, 1, 2, 3]], "shift_labels": [[5, 6, 7, 8]]}, True, True, [5, 6, 7, 8]),
        ({"input_ids": [[9, 1, 2, 3]]}, True, True, None),
        ({"labels": [[9, 1, 2, 3]]}, False, True, None),
        ({"labels": [[9, 1, 2, 3]]}, True, False, None),
    ],
)
def test_the_next_tokens_of_a_training_step_are_measured(inputs, training, measuring, expected):
    looks = SourceLosses(SimpleNamespace(sources=["a"]), SimpleNamespace())
    looks.is_measuring = measuring
    seen = []
    looks.add = lambda model, targets, number, output: seen.append((targets.tolist(), number))
    model = torch.nn.Module().train(training)
    tensors = {name: torch.tensor(rows) for name, rows in inputs.items()}
    looks.look(model, None, tensors | {"num_items_in_batch": 7}, {"loss": 1.0})
    with torch.no_grad():
        looks.look(model, None, tensors, {"loss": 1.0})
    assert seen == ([] if expected is None else [([expected], 7)])
    assert looks.micro_batch == int(training)
