import gzip
import json

import pytest
from saved_runs import trainer_of as four_steps
from tiny_faults import events

from cpt.errors import RecipeError
from cpt.monitoring.profiler import check_profiled_steps
from cpt.recipe.schema import Profile

KINDS = ("profile", "profile_left_out")


def profiled(recipe, folder, make=four_steps, **options):
    return make({**recipe, "monitoring": {"profile": options}}, folder)


@pytest.mark.slow
@pytest.mark.parametrize(("first", "steps"), [pytest.param(1, 1, marks=pytest.mark.slow), (2, 2)])
def test_the_steps_are_traced_and_their_dearest_operations_listed(first, steps, tiny_recipe, tmp_path):
    trainer = profiled(tiny_recipe, tmp_path, at_step=first, steps=steps, memory=True)
    trainer.train()
    name = f"steps-{first}-{first + steps - 1}"
    with gzip.open(trainer.run_folder / "profile" / f"{name}.json.gz") as file:
        trace = json.load(file)["traceEvents"]
    marks = [
        event["name"]
        for event in trace
        if event.get("name", "").startswith("ProfilerStep#") and event.get("cat") == "user_annotation"
    ]
    assert len(marks) == steps
    # Two micro-batches of two layers each: the optimizer's kernel runs once a step, attention four times.
    names = [event.get("name") for event in trace]
    assert names.count("aten::scaled_dot_product_attention") == 4 * steps, "two micro-batches of two layers"
    table = (trainer.run_folder / "profile" / f"{name}.txt").read_text()
    assert "aten::mm" in table and "Self CPU" in table and "CPU Mem" in table
    assert events(trainer, *KINDS) == [("profile", first)]


def test_steps_that_the_run_does_not_have_cannot_be_profiled():
    check_profiled_steps(Profile(at_step=8, steps=2), steps=9)
    with pytest.raises(RecipeError, match="monitoring.profile.at_step"):
        check_profiled_steps(Profile(at_step=9, steps=2), steps=9)
