import numpy as np
import pytest
from run_folders import write_run

from cpt.compare.curves import LossCurve, bit_equality, loss_topic
from cpt.compare.record import read_record


def test_smoothing_takes_the_mean_of_the_span_before():
    curve = LossCurve(np.array([10.0, 20, 30, 40]), np.array([4.0, 3, 2, 1]))
    assert curve.smoothed(20).tolist() == [4, 3.5, 2.5, 1.5]
    assert curve.smoothed(0).tolist() == [4, 3, 2, 1]


def test_the_loss_at_a_count_of_tokens_is_that_of_the_logs_before_it():
    curve = LossCurve(np.array([10.0, 20, 30, 40]), np.array([4.0, 3, 2, 1]))
    assert [curve.at(tokens, 15) for tokens in (5, 10, 25, 40, 100)] == [None, 4, 3, 1.5, 1]


def test_no_losses_give_no_topic(tmp_path):
    runs = [write_run(tmp_path / name) for name in ("a", "b")]
    for run in runs:
        (run / "metrics.jsonl").unlink()
    assert loss_topic([read_record(run, run.name) for run in runs], [True, True]).is_empty


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ('{"step": 50, "tokens": 1, "loss": 1}\n', ""),
        ('{"step": 5, "tokens": 5120, "loss": 4.5}\n', "bit-equal up to step 5, their last common log (1 compared)."),
        ('{"step": 5, "tokens": 5120, "loss": 4}\n', "Beside a, the losses of b first differ at step 5: 4.0 and 4.5."),
    ],
)
def test_bit_equality_is_of_common_steps(tmp_path, lines, told):
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b")
    (b / "metrics.jsonl").write_text(lines)
    assert bit_equality(read_record(a, "a"), read_record(b, "b")).endswith(told)
