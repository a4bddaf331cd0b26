import json
import math

import numpy as np
import pytest

from cpt.runs import metrics
from cpt.runs.metrics import read_metrics

LINES = [
    {"step": 1, "tokens": 10, "loss": 2.5},
    {"step": 1, "tokens": 10, "eval_a_loss": 3},
    {"step": 2, "tokens": 20, "loss": 2.25, "note": "x"},
]


def written(folder, *lines):
    (folder / "metrics.jsonl").write_bytes(
        b"".join(line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n" for line in lines)
    )
    return folder


def test_each_figure_is_a_column_with_nan_where_a_line_lacks_it(tmp_path):
    read = read_metrics(written(tmp_path, *LINES))
    assert read.columns["step"].tolist() == [1, 1, 2] and read.columns["loss"].dtype == np.float64
    assert math.isnan(read.columns["loss"][1]) and math.isnan(read.columns["eval_a_loss"][0])
    assert sorted(read.names) == ["eval_a_loss", "loss", "step", "tokens"]


def test_a_curve_is_over_tokens_where_there_is_a_value(tmp_path):
    read = read_metrics(written(tmp_path, *LINES))
    tokens, losses = read.curve("loss")
    assert tokens.tolist() == [10, 20] and losses.tolist() == [2.5, 2.25] and read.last("loss") == 2.25
    assert read.last("mfu") is None and [len(part) for part in read.curve("mfu")] == [0, 0]


def test_a_curve_is_in_the_order_of_tokens_even_where_a_line_was_added_later(tmp_path):
    read = read_metrics(written(tmp_path, {"step": 5, "tokens": 50, "a": 2}, {"step": 0, "tokens": 0, "a": 1}))
    assert read.curve("a")[0].tolist() == [0, 50] and read.last("a") == 2


def test_only_what_is_wanted_is_read_patterns_too(tmp_path):
    read = read_metrics(written(tmp_path, *LINES), ["eval_*"])
    assert set(read.columns) == {"step", "tokens", "eval_a_loss"}
    assert read.last("eval_a_loss") == 3 and len(read.columns["step"]) == 3


def test_there_is_nothing_where_there_is_no_file(tmp_path):
    for read in (read_metrics(tmp_path), read_metrics(tmp_path / "nowhere"), read_metrics(written(tmp_path))):
        assert list(read.columns) == ["step", "tokens"] and len(read.columns["step"]) == 0 and read.names == []


@pytest.mark.parametrize("names", [None, ["loss"]])
@pytest.mark.parametrize(
    "rubbish",
    [
        b'{"step": 3, "tok',
        b"\xff\xfe not text\n",
        b"\0" * 100 + b"\n",
        b"[1, 2]\n5\n",
        b'{"step": 3, "tokens": 30, "loss": NaN}\n',
        b'{"step": 3, "tokens": 30, "loss": -Infinity}\n',
        b'{"step": 3, "tokens": 30, "loss": "NaN: text"}\n',
        b'{"step": 3, "tokens": 30, "loss": true}\n',
        b'{"step": 3, "tokens": 30, "loss": [1, {"a": 2}]}\n',
        b'{"step": 3, "tokens": 30, "loss": 1e999}\n',
        b'{"step": 3, "tokens": 30, "loss": ' + b"9" * 400 + b"}\n",
        b"\n\n",
        b'{"step": 3, "step": 3}\n',
    ],
)
def test_a_line_that_is_rubbish_costs_no_other_line(tmp_path, rubbish, names):
    end = b"" if rubbish.endswith(b"\n") else b"\n"
    folder = written(tmp_path, *LINES, rubbish, end, {"step": 4, "tokens": 40, "loss": 2.0})
    assert read_metrics(folder, names).curve("loss")[1].tolist() == [2.5, 2.25, 2.0]


def test_blocks_are_joined_whatever_each_of_them_has(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics, "BLOCK", 100)
    lines = [{"step": step, "tokens": 10 * step, "late" if step > 50 else "early": step / 7} for step in range(100)]
    lines[30]["early"] = "rubbish"
    read = read_metrics(written(tmp_path, *lines))
    assert read.columns["step"].tolist() == list(range(100))
    assert len(read.curve("early")[0]) == 50 and read.curve("late")[1].tolist() == [
        step / 7 for step in range(51, 100)
    ]


def test_floats_come_back_to_the_last_bit(tmp_path):
    values = np.random.default_rng(0).random(1000).tolist()
    read = read_metrics(
        written(tmp_path, *({"step": step, "tokens": step, "loss": value} for step, value in enumerate(values)))
    )
    assert read.columns["loss"].tolist() == values


def test_a_line_that_is_longer_than_its_room_is_read_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics, "BLOCK", 60)
    monkeypatch.setattr(metrics, "LONGEST_LINE", 8)
    lines = [
        {"step": step, "tokens": 10 * step, "loss": 1 / step, "samples": "x" * (step % 7) * 30}
        for step in range(1, 40)
    ]
    assert read_metrics(written(tmp_path, *lines)).curve("loss")[1].tolist() == [1 / step for step in range(1, 40)]
