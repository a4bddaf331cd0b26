import numpy as np
import pytest

from cpt.errors import DataError
from cpt.evaluation.evaluate import EvaluationResult, build_report
from cpt.evaluation.paired import Difference, DocumentLosses, ScoreReport, SetReport
from cpt.evaluation.tasks import TaskScore


def losses(bits_per_byte, count=40):
    sizes = np.full(count, 1000)
    nats = (bits_per_byte + 0.1 * np.sin(np.arange(count))) * 1000 * np.log(2)
    return DocumentLosses(np.arange(count, dtype=np.uint64), sizes, nats, sizes // 4, sizes // 10)


def answers(right, count=40):
    return {("domain", kind): np.arange(count) % 10 < right for kind in ("cloze", "continuation")}


def score(value):
    by_question = np.array([0.0, 1.0] * 10) if value == 0.5 else np.ones(20)
    report = ScoreReport("quiz", "acc,none", value, (value - 0.196, value + 0.196), 20)
    return TaskScore(report, by_question, tuple(map(str, range(20))))


def measured(name, bits_per_byte, right, value, count=40):
    return EvaluationResult(name, {"domain": losses(bits_per_byte, count)}, answers(right), [score(value)])


def test_a_model_alone_has_figures_and_no_differences():
    found = build_report(measured("m", 2.0, 5, 0.5))
    assert found.sets[0].against is None and found.base is None
    assert (
        found.verdicts()[0]
        == f"domain: {found.sets[0].bits_per_byte:.4f} bits per byte, 40.0% of the next tokens right."
    )
    assert found.verdicts()[3].startswith("quiz (acc,none): 0.500 (95 % interval 0.304 to 0.696), 20 questions.")


def test_against_a_base_each_set_test_and_task_has_a_line_of_verdict():
    found = build_report(measured("m", 1.8, 7, 1.0), measured("b", 2.0, 5, 0.5))
    text, cloze, continuation, quiz = found.verdicts()
    assert (
        text.startswith("domain: better: 2.0")
        and "bits per byte, -10.0 % (95 % interval -10.0 to -10.0 %, 40 pairs, 0 of them worse)." in text
    )
    assert cloze.startswith("domain cloze (accuracy): better: 0.5000 -> 0.7000, +0.2000 (95 % interval +0.0")
    assert continuation.startswith("domain continuation") and quiz.startswith(
        "quiz (acc,none): better: 0.5000 -> 1.0000"
    )


def test_a_difference_that_may_be_none_is_called_so():
    alike = Difference(1.0, 1.01, 0.01, -0.02, 0.04, 50)
    assert SetReport("code", 50, 9, 9, 0.7, 2.0, 1.01, 0.5, alike).verdict().startswith("code: unknown:")
    worse = SetReport("code", 8, 9, 9, 0.7, 2.0, 1.1, 0.5, Difference(1.0, 1.1, 0.1, 0.05, 0.15, 8)).verdict()
    assert (
        worse == "code: worse: 1.0000 -> 1.1000 bits per byte, +10.0 % (95 % interval +5.0 to +15.0 %; only 8 pairs)."
    )


def test_a_set_of_one_document_cannot_be_compared():
    with pytest.raises(DataError, match="the held-out set `domain`: an interval needs 2 documents at least"):
        build_report(measured("m", 1.8, 7, 1.0, count=1), measured("b", 2.0, 5, 0.5, count=1))
