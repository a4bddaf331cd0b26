import json

import pytest
import torch

from cpt.checkpoints.agreement import SaveFailed
from cpt.errors import RestartNeeded
from cpt.rehearsal.watching import failures_noted, memory_of_this_process, place_of


def evaluate():
    raise torch.OutOfMemoryError("CUDA out of memory")


def export_model():
    evaluate()


def caught(function):
    try:
        function()
    except Exception as problem:
        return problem


def restarts():
    try:
        evaluate()
    except RuntimeError as problem:
        raise RestartNeeded("again") from problem


def test_an_error_belongs_to_the_outermost_thing_that_was_under_way():
    assert place_of(caught(evaluate)) == "evaluation"
    assert place_of(caught(export_model)) == "export"
    assert place_of(caught(lambda: int("x"))) is None


def test_what_an_error_came_from_tells_its_place_too():
    assert place_of(caught(restarts)) == "evaluation"


def test_a_failure_is_written_down_with_the_class_of_its_remedy_and_goes_on(tmp_path):
    with pytest.raises(SaveFailed), failures_noted(tmp_path):
        raise SaveFailed("error", "no model could be loaded")
    noted = json.loads(next(tmp_path.glob("failed-0-*.json")).read_text())
    assert (noted["error"], noted["is_expected"], noted["message"]) == (
        "CheckpointError",
        True,
        "no model could be loaded",
    )


def test_the_most_memory_so_far_is_known():
    before = memory_of_this_process().host
    grown = torch.ones(64 << 20)
    after = memory_of_this_process()
    assert after.host >= grown.nbytes and after.host >= before > 0 and after.of_gpu == 0
