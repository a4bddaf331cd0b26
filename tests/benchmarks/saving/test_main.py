import pytest

from benchmarks.saving.__main__ import measure, more, results_of, write_recipe
from cpt.recipe.load import load_recipe


def rounds(ours, stall):
    """On a machine that is twice as slow in every other round."""
    seconds = {
        "theirs": 1.0,
        "syncing_theirs": 0.25,
        "ours": ours,
        "bare": 0.8,
        "held": stall / 2,
        "waited": stall / 2,
        "copying": 0.3,
    }
    worked = {"theirs_processor": 1.0, "ours_processor": ours, "bare_processor": 0.8, "step": 3.0, "step_beside": 3.1}
    return [
        {"bytes": 10**9, "load": 1.0, **{name: one * slow for name, one in {**seconds, **worked}.items()}}
        for slow in (1, 2, 1, 2, 1)
    ]


def test_pairs_are_compared_before_they_are_summed_up():
    assert more([1.2, 2.4, 3.6], [1.0, 2.0, 3.0]) == pytest.approx([20, 20, 20])


@pytest.mark.parametrize(
    ("ours", "stall", "met"), [(1.04, 0.05, (True, True, True)), (1.06, 0.2, (False, True, False))]
)
def test_a_save_may_add_five_percent_and_stall_a_tenth_of_one(ours, stall, met):
    found = {row["name"]: row for row in results_of({"plain": rounds(ours, stall)})["measurements"]}
    added = found["plain, 1.00 GB: hash, fsync and rename add to the Trainer's save"]
    durable = found["plain, 1.00 GB: hash, fsync and rename add to the Trainer's save and fsync of its files"]
    stalled = found["plain, 1.00 GB: stall of a save in the background, beside a blocking one"]
    assert (added["met"], durable["met"], stalled["met"]) == met and added["measured"] == pytest.approx(
        100 * (ours - 1)
    )


@pytest.mark.parametrize("stage", [None, 2, 3])
def test_the_run_that_is_measured_is_a_recipe(tmp_path, stage):
    recipe = load_recipe(write_recipe(tmp_path, stage, rounds=2, gigabytes=1.0))
    assert recipe.model.config["num_hidden_layers"] == {None: 5, 2: 4, 3: 4}[stage] and recipe.budget.tokens == 4 * 256


@pytest.mark.long
def test_a_run_is_saved_in_all_ways(tmp_path):
    found = results_of({"plain": measure(tmp_path, "plain", gigabytes=0.1, rounds=2)})
    assert all(row["measured"] > 0 for row in found["measurements"] if row["unit"] == "seconds")
    assert [round(one["bytes"] / 1e8) for one in found["samples"]["plain"]] == [2, 2]
