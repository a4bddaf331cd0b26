import pytest

from benchmarks.saving.__main__ import ratio, results_of, write_recipe
from cpt.recipe.load import load_recipe


def rounds(ours, stall):
    """Of a disk that is twice as slow in every other round."""
    common = {"bytes": 10**9, "until_synced": 0.3, "step_after_ours": 3.0, "step_after_behind": 3.1}
    ours_alone = {"ours": ours, "held": stall / 2, "waited": stall / 2}
    return [{**common, "theirs": slow, **{name: seconds * slow for name, seconds in ours_alone.items()}} for slow in (1, 2, 1, 2, 1)]


def test_pairs_are_compared_before_they_are_summed_up():
    assert ratio(rounds(1.2, 0.1), "ours", "theirs") == pytest.approx(120)


@pytest.mark.parametrize(("ours", "stall", "met"), [(1.04, 0.05, (True, True)), (1.06, 0.2, (False, False))])
def test_a_save_may_add_five_percent_and_stall_a_tenth_of_one(ours, stall, met):
    found = {row["name"]: row for row in results_of({"plain": rounds(ours, stall)})["measurements"]}
    added = found["plain, 1.00 GB: hash, fsync and rename, beside the Trainer's save"]
    stalled = found["plain, 1.00 GB: stall of a save in the background, beside a blocking one"]
    assert (added["met"], stalled["met"]) == met and added["measured"] == pytest.approx(100 * (ours - 1))


@pytest.mark.parametrize("stage", [None, 2, 3])
def test_the_run_that_is_measured_is_a_recipe(tmp_path, stage):
    recipe = load_recipe(write_recipe(tmp_path, stage, rounds=2, gigabytes=1.0))
    assert recipe.model.config["num_hidden_layers"] == {None: 5, 2: 4, 3: 4}[stage] and recipe.budget.tokens == 12 * 256
