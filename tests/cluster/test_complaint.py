"""A complaint is a sentence with its host; equal ones are one."""

import json

import pytest

from cpt.cluster.complaint import Complaint, Unfit, as_lines, from_lines, merged, refuse, sentence
from cpt.errors import LaunchError

TORCH = Complaint("host-1", "torch is old", "Install it.")


def test_a_sentence_has_host_cause_and_remedy():
    assert sentence(TORCH) == "host-1: torch is old. Install it."
    assert sentence(Complaint("host-1", "it is gone.")) == "host-1: it is gone."


def test_equal_causes_are_told_once_with_all_hosts_and_fatal_ones_first():
    small = Complaint("host-0", "small disk", fatal=False)
    assert list(merged([small, TORCH, Complaint("host-2", "torch is old", "Install it.")])) == [
        Complaint("host-1, host-2", "torch is old", "Install it."),
        small,
    ]


def test_only_fatal_ones_stop_a_run():
    refuse([Complaint("host-0", "small disk", fatal=False)])
    with pytest.raises(LaunchError, match="host-1: torch is old"):
        refuse([TORCH])


def test_they_travel_as_json():
    assert from_lines(json.loads(json.dumps(as_lines([TORCH])))) == [TORCH]
    assert str(Unfit([TORCH])) == sentence(TORCH)
