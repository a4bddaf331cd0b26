"""A row for each complaint; the exit code says whether one is fatal."""

from cpt.cluster.complaint import Complaint
from cpt.cluster.showing import show_complaints


def test_the_table_names_host_cause_and_remedy(capsys):
    assert show_complaints([Complaint("host-1", "`data.sources[0].path`: none", "Copy it.")], 2) == 2
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("2 nodes", "host-1", "`data.sources[0].path`: none", "Copy it."))


def test_what_only_costs_time_does_not_fail(capsys):
    assert show_complaints([Complaint("host-1", "small disk", fatal=False)], 2) == 0
    assert show_complaints([], 2) == 0
    assert capsys.readouterr().out.count("small disk") == 1
