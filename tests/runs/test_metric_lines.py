import json

import numpy as np
import pytest

from cpt.runs import metric_lines
from cpt.runs.metric_lines import OtherForm, by_commas, columns_of, line_by_line

LOG = [{"step": step, "tokens": 10 * step, "loss": 5 - step / 7, "rate": step * 1e-9} for step in range(1, 20)]
EVALUATION = {"step": 10, "tokens": 100, "eval_a": 2}


def block_of(*lines):
    return b"".join(json.dumps(line).encode() + b"\n" if isinstance(line, dict) else line for line in lines)


def same(first, second):
    return first.keys() == second.keys() and all(
        np.array_equal(first[name], second[name], equal_nan=True) for name in first
    )


@pytest.mark.parametrize("names", [None, ["loss"], ["rate", "eval_*"], ["eval_*"], ["no"]])
@pytest.mark.parametrize(
    "lines",
    [
        LOG,
        [*LOG[:10], EVALUATION, *LOG[10:]],
        [EVALUATION, *LOG],
        [*LOG, EVALUATION, {"step": 19, "tokens": 190, "train_runtime": 3.5, "note": "a, b"}],
        [EVALUATION, EVALUATION, *LOG[:3], EVALUATION],
        [*LOG[:5], b'{"step": 6, "tok', b"\n", *LOG[5:]],
        [*LOG[:5], b"[1, 2, 3, 4]\n", b"1,2,3,4\n", *LOG[5:]],
    ],
)
def test_reading_by_commas_gives_what_reading_line_by_line_gives(lines, names):
    block = block_of(*lines)
    try:
        read = by_commas(block, names)
    except OtherForm:
        assert any(isinstance(line, bytes) for line in lines)
        return
    by_line = line_by_line(block.splitlines(), names)
    assert same({**by_line, **read}, by_line) and same({**read, **by_line}, {**by_line, **read})


def test_lines_that_are_alike_are_read_at_once(monkeypatch):
    monkeypatch.setattr(metric_lines, "line_by_line", None)
    assert columns_of(block_of(*LOG), None)["loss"].tolist() == [line["loss"] for line in LOG]


@pytest.mark.parametrize(
    "odd",
    [
        {"step": 3, "tokens": 30, "rate": 1.0, "loss": 2.0},  # other order
        {"step": 3, "tokens": 30, "loss": "2.0", "rate": 1.0},
        {"step": 3, "tokens": 30, "loss": None, "rate": 1.0},
        {"step": 3, "tokens": 30, "loss": {"a": 2.0}, "rate": 1.0},
        {"step": 3, "tokens": 30, "löss": 2.0, "rate": 1.0},
        b'{"step": 3, "tokens": 30, "loss": 2.0, "rate": 1.0\n',
        b'{"step":3,"tokens":30,"loss":2.0,"rate":1.0}\n',
    ],
)
def test_a_line_of_another_form_is_not_taken_for_one_of_this(odd):
    read = columns_of(block_of(*LOG[:2], odd, *LOG[3:]), ["loss", "rate"])
    expected = line_by_line(block_of(*LOG[:2], odd, *LOG[3:]).splitlines(), ["loss", "rate"])
    assert same(read, expected)
    assert len(read["loss"]) == (18 if isinstance(odd, bytes) and b": 1.0\n" in odd else 19)


def test_no_lines_give_empty_columns():
    for block in (b"", b"\n", b"rubbish\n"):
        assert {name: len(values) for name, values in columns_of(block, None).items()} == {"step": 0, "tokens": 0}


def test_what_only_python_writes_counts_as_not_there():
    lines = [
        {"step": step, "tokens": step, "loss": float(value)}
        for step, value in enumerate(["1", "nan", "inf", "-inf", "2"])
    ]
    assert np.array_equal(columns_of(block_of(*lines), None)["loss"], [1, np.nan, np.nan, np.nan, 2], equal_nan=True)
