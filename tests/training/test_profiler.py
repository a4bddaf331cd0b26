import gzip
import json

import pytest
from saved_runs import trainer_of as four_steps
from tiny_faults import events

from cpt.errors import RecipeError
from cpt.training.callbacks import check_profiled_steps

KINDS = ("profile", "profile_left_out")


def profiled(recipe, folder, step, make=four_steps):
    return make({**recipe, "monitoring": {"profile": step}}, folder)


@pytest.mark.slow
@pytest.mark.parametrize("first", [1, 2])
def test_three_steps_are_traced_and_their_most_expensive_operations_listed(first, tiny_recipe, tmp_path):
    trainer = profiled(tiny_recipe, tmp_path, first)
    trainer.train()
    name = f"steps-{first}-{first + 2}"
    with gzip.open(trainer.run_folder / "profile" / f"{name}.json.gz") as file:
        trace = json.load(file)["traceEvents"]
    marks = [
        event["name"]
        for event in trace
        if event.get("name", "").startswith("ProfilerStep#") and event.get("cat") == "user_annotation"
    ]
    assert len(marks) == 3
    names = [event.get("name") for event in trace]
    assert names.count("aten::scaled_dot_product_attention") == 4 * 3, "two micro-batches of two layers"
    table = (trainer.run_folder / "profile" / f"{name}.txt").read_text()
    assert "aten::mm" in table and "Self CPU" in table
    assert events(trainer, *KINDS) == [("profile", first)]


def test_steps_that_the_run_does_not_have_cannot_be_profiled():
    check_profiled_steps(7, steps=9)
    with pytest.raises(RecipeError, match="monitoring.profile"):
        check_profiled_steps(8, steps=9)
