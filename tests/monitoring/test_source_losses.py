import json
import random
from types import SimpleNamespace

import pytest
import torch
from saved_runs import trainer_of as four_steps
from tiny_faults import in_rows, train_to_the_end, trainer_of
from torch.nn import functional as F

from cpt.data.rows.rows import IGNORED
from cpt.models.fused_loss import FusedLoss
from cpt.monitoring import source_losses
from cpt.monitoring.source_losses import SourceLosses, drawn, num_measured, summed_loss


@pytest.fixture
def recipe(tiny_recipe, tmp_path):
    """Two sources, of which one says the same word again and again; each row of a step is another source's."""
    draw = random.Random(1)
    for name, words in {
        "easy": lambda: ["the"] * 60,
        "hard": lambda: draw.choices("abcdefghijklmnopqrstuvwxyz0123456789", k=60),
    }.items():
        lines = [json.dumps({"text": " ".join(words()) + f" {number}"}) for number in range(60)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    sources = [{"path": str(tmp_path / "easy.jsonl")}, {"path": str(tmp_path / "hard.jsonl")}]
    return {**tiny_recipe, "data": {**tiny_recipe["data"], "sources": sources}}


def with_batches(recipe, size, fused=False, **training):
    return {
        **recipe,
        "model": {**recipe["model"], "fused_loss": fused},
        "training": {**recipe["training"], "per_device_train_batch_size": size, **training},
    }


def callback_of(trainer):
    (found,) = (callback for callback in trainer.callback_handler.callbacks if isinstance(callback, SourceLosses))
    return found


def by_hand(trainer, rows):
    """The mean over the tokens of each source's rows, one row at a time."""
    sums, counts = [0.0, 0.0], [0, 0]
    for number in rows:
        row, source = trainer.rows[number], trainer.rows.source_of(number)
        with torch.no_grad():
            logits = trainer.model(input_ids=row["input_ids"][None], position_ids=row["position_ids"][None]).logits[0]
        sums[source] += F.cross_entropy(logits[:-1], row["labels"][1:], ignore_index=IGNORED, reduction="sum").item()
        counts[source] += int((row["labels"][1:] != IGNORED).sum())
    return {
        name: total / count
        for name, total, count in zip(("loss_easy", "loss_hard"), sums, counts, strict=True)
        if count
    }


def logged(trainer):
    return [json.loads(line) for line in (trainer.run_folder / "metrics.jsonl").read_text().splitlines()]


SMALLER = [pytest.param(size, marks=pytest.mark.slow) for size in (2, 1)]


@pytest.mark.parametrize("size", [4, *SMALLER], ids=["mixed", "mixed and accumulated", "a row at a time"])
@pytest.mark.parametrize("fused", [False, True], ids=["logits", "fused loss"])
def test_each_source_has_the_loss_of_its_rows(size, fused, recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(source_losses, "MICRO_BATCHES_FOR_ONE", 1)
    trainer = four_steps(with_batches(recipe, size, fused=fused), tmp_path)
    assert isinstance(trainer.model.loss_function, FusedLoss) == fused
    trainer.model.eval()
    expected = by_hand(trainer, range(4))
    trainer.train()
    first = logged(trainer)[0]
    assert {name: first[name] for name in expected} == pytest.approx(expected, rel=1e-4) and len(expected) == 2


@pytest.mark.slow
def test_a_source_that_is_easier_has_a_lower_loss(recipe, tmp_path):
    trainer = trainer_of(with_batches(recipe, 1), tmp_path)
    hooks = len(trainer.model._forward_hooks)
    trainer.train()
    assert len(trainer.model._forward_hooks) == hooks, "nothing stays behind in the model"
    last = [line for line in logged(trainer) if "loss_easy" in line][-1]
    assert last["loss_easy"] < last["loss"] < last["loss_hard"]


def test_logs_of_every_step_look_at_one_of_twenty_micro_batches(recipe, tmp_path):
    trainer = four_steps(with_batches(recipe, 4), tmp_path)
    trainer.train()
    assert ["loss_easy" in line for line in logged(trainer)[:4]] == [True, False, False, False]


@pytest.mark.parametrize(
    ("every", "micro_batches", "looks"), [(1, 1, 3), (10, 1, 3), (10, 4, 12), (50, 8, 8), (60, 1, 1)]
)
def test_looks_are_spread_over_the_run(every, micro_batches, looks):
    """Sixty steps have 60 micro-batches, or so many times that."""
    assert sum(num_measured(step, every, micro_batches) for step in range(every, 61, every)) == looks
    assert num_measured(every, every, micro_batches) >= 1, "the first log has them"


def watched(trainer):
    """Whether the rows that the callback believes to see are those that the model is given, for each micro-batch of
    the run."""
    callback, agree = callback_of(trainer), []

    def compare(_, __, inputs):
        if torch.is_grad_enabled():
            rows = torch.stack([trainer.rows[number]["input_ids"] for number in callback.rows_under_way()])
            agree.append(torch.equal(rows, inputs["input_ids"]))

    trainer.model.register_forward_pre_hook(compare, with_kwargs=True)
    return agree


def out_of_memory(loss):
    raise torch.OutOfMemoryError("CUDA out of memory.")


def test_processes_that_share_rows_see_the_same_ones():
    looks = SourceLosses(SimpleNamespace(sources=["a"]), SimpleNamespace(first=lambda step: 100), sharing_rows=2)
    looks.state, looks.micro_batch = SimpleNamespace(global_step=5), 1
    seen = []
    for rank in range(4):
        looks.args = SimpleNamespace(per_device_train_batch_size=3, world_size=4, process_index=rank)
        seen.append(looks.rows_under_way())
    assert seen == [range(106, 109)] * 2 + [range(109, 112)] * 2


@pytest.mark.slow
def test_rows_are_known_also_after_a_roll_back(recipe, tmp_path):
    bad = in_rows(29, 33)
    safety = {"loss_guard": {"name": "robust", "skips": 1, "window": 16}}
    agree = []

    def make():
        trainer = trainer_of({**recipe, "checkpoints": {"every_steps": 2}}, tmp_path, faults=bad, safety=safety)
        agree.append(watched(trainer))
        return trainer

    trainer = train_to_the_end(make, restarts=1)
    assert trainer.rows_of_steps.left_out and all(agree[-1]) and agree[-1]
    told = [line for line in logged(trainer) if "loss_easy" in line]
    assert all(line["loss_easy"] == line["loss_easy"] for line in told) and told


@pytest.mark.slow
def test_where_memory_ends_the_figures_are_left_out_and_the_run_goes_on(recipe, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(source_losses, "summed_loss", lambda *_: out_of_memory(None))
    trainer = four_steps(with_batches(recipe, 4), tmp_path)
    trainer.train()
    assert trainer.state.global_step == 4 and not any("loss_easy" in line for line in logged(trainer))
    assert caplog.text.count("loss_<source> is not logged") == 1


@pytest.mark.slow
def test_a_model_without_logits_is_told_of_once(recipe, tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO", "cpt")
    monkeypatch.setattr(source_losses, "loss_of_rows", lambda *_: None)
    four_steps(with_batches(recipe, 4), tmp_path).train()
    assert caplog.text.count("loss_<source> skips") == 1


def test_one_source_has_nothing_to_compare(recipe, tmp_path):
    trainer = four_steps({**recipe, "data": {**recipe["data"], "sources": recipe["data"]["sources"][:1]}}, tmp_path)
    assert not [callback for callback in trainer.callback_handler.callbacks if isinstance(callback, SourceLosses)]


def test_a_row_is_summed_in_parts(monkeypatch):
    torch.manual_seed(0)
    logits, targets = torch.randn(50, 30), torch.randint(0, 30, (50,))
    targets[::7] = IGNORED
    monkeypatch.setattr(source_losses, "BYTES_AT_ONCE", 12 * 30 * 8)
    assert summed_loss(logits, targets).item() == pytest.approx(
        F.cross_entropy(logits, targets, reduction="sum").item(), rel=1e-6
    )


@pytest.mark.parametrize("every", [2, 10, 16])
def test_the_step_that_is_looked_at_has_no_fixed_place_between_two_logs(every):
    """Sources take turns in patterns of some rows, which logs can be in step with."""
    steps = [log * every + drawn(log, every) for log in range(100)]
    assert {step % 2 for step in steps} == {0, 1} and {step % every for step in steps} == set(range(every))
    assert steps == [log * every + drawn(log, every) for log in range(100)]
