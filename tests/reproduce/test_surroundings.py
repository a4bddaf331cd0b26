import copy

import pytest

from cpt.reproduce.surroundings import changes_on_the_way, differing_surroundings

PLACE = {
    "started": "2026-01-01T00:00:00+00:00",
    "processes": 1,
    "python": "3.11.7",
    "versions": {"torch": "2.13.0", "deepspeed": None},
    "hardware": {"processor": "Some CPU", "cores": 4, "host_memory_gib": 24, "gpus": ["H100"], "driver": "580"},
    "code": "a" * 32,
    "git": {"commit": "b" * 40, "changes": "", "diff": ""},
}


def with_change(path, value):
    place = copy.deepcopy(PLACE)
    part = place
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = value
    return place


def test_the_same_place_at_another_time_is_the_same():
    assert differing_surroundings(PLACE, with_change(["started"], "later")) == []
    assert differing_surroundings(PLACE, with_change(["hardware", "host_memory_gib"], 23)) == []


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        (["versions", "torch"], "2.11.0", "versions: torch 2.13.0 -> 2.11.0"),
        (["versions", "deepspeed"], "0.19", "versions: deepspeed none -> 0.19"),
        (["python"], "3.12.1", "versions: python 3.11.7 -> 3.12.1"),
        (["hardware", "gpus"], ["A100", "A100"], "hardware: gpus H100 -> A100, A100"),
        (["hardware", "cores"], 2, "hardware: cores 4 -> 2"),
        (["code"], "c" * 32, "code: of cpt (hash of its files) aaaaaaaaaaaa -> cccccccccccc"),
        (["git", "commit"], "d" * 40, "code: git commit bbbbbbbbbbbb -> dddddddddddd"),
        (["git", "diff"], "+one\n+two", "code: uncommitted changes none -> 2 lines of diff"),
        (["git"], None, "code: git commit bbbbbbbbbbbb -> none"),
        (["processes"], 2, "launch: processes 1 -> 2"),
    ],
)
def test_one_difference_is_told_in_one_line(path, value, told):
    assert [str(difference) for difference in differing_surroundings(PLACE, with_change(path, value))] == [told]


def test_what_an_older_version_did_not_record_is_not_compared():
    old = {key: value for key, value in PLACE.items() if key not in ("hardware", "code", "git")}
    assert differing_surroundings(old, PLACE) == []


def test_a_run_that_went_on_in_other_surroundings_says_from_when():
    starts = [{"started": "2026-01-02", "processes": 2}, {"started": "2026-01-03"}]
    assert [str(change) for change in changes_on_the_way(PLACE, starts)] == [
        "launch: processes, from the run's own start at 2026-01-02 on: 1 -> 2"
    ]
