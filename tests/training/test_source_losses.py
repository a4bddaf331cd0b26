import json
import random
from types import SimpleNamespace

import pytest
import torch
from saved_runs import trainer_of as four_steps
from torch.nn import functional as F

from cpt.data.rows.packing import IGNORED
from cpt.models.fused_loss import FusedLoss
from cpt.training.source_losses import SourceLosses


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


def by_hand(trainer, rows):
    """The mean over the tokens of each source's rows, one row at a time."""
    sums, counts = [0.0, 0.0], [0, 0]
    for number in rows:
        row, source = trainer.rows[number], trainer.rows.turn(number)[0]
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


@pytest.mark.parametrize("size", [4, pytest.param(1, marks=pytest.mark.slow)], ids=["mixed", "a row at a time"])
@pytest.mark.parametrize("fused", [False, True], ids=["logits", "fused loss"])
def test_each_source_has_the_loss_of_its_rows(size, fused, recipe, tmp_path):
    trainer = four_steps(with_batches(recipe, size, fused=fused), tmp_path)
    assert isinstance(trainer.model.loss_function, FusedLoss) == fused
    trainer.model.eval()
    expected = by_hand(trainer, range(4))
    trainer.train()
    first = logged(trainer)[0]
    assert {name: first[name] for name in expected} == pytest.approx(expected, rel=1e-4) and len(expected) == 2


def test_processes_that_share_rows_see_the_same_ones():
    looks = SourceLosses(SimpleNamespace(sources=["a"]), SimpleNamespace(first=lambda step: 100), sharing_rows=2)
    looks.state, looks.micro_batch = SimpleNamespace(global_step=5), 1
    seen = []
    for rank in range(4):
        looks.args = SimpleNamespace(per_device_train_batch_size=3, world_size=4, process_index=rank)
        seen.append(looks.rows_under_way())
    assert seen == [range(106, 109)] * 2 + [range(109, 112)] * 2
