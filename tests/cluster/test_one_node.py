"""One node tells what concerns it, or reports to the machine that asked."""

import json

import pytest

from cpt.cluster import one_node
from cpt.cluster.check import Fit
from cpt.cluster.complaint import Complaint, Unfit
from cpt.cluster.one_node import check_this_node
from cpt.cluster.place import place_of_node
from cpt.errors import CptError

OLD = Complaint("host-1", "torch is old", "Install it.")
SMALL = Complaint("host-0", "small disk", fatal=False)
NAMES = ["host-0", "host-1", "host-2"]


@pytest.fixture
def found(monkeypatch):
    """Say what the check finds."""

    def finds(*complaints: Complaint) -> None:
        def check(place, recipe):
            if any(complaint.fatal for complaint in complaints):
                raise Unfit(complaints)
            return Fit(NAMES, list(complaints), "gloo", 67.0, 1.0, 100.0)

        monkeypatch.setattr(one_node, "check_nodes", check)

    return finds


def told(capsys, node: int, *, report: bool = False) -> tuple[int, str]:
    code = check_this_node(place_of_node(node, NAMES, "host-0:29500"), None, (), report=report)
    return code, capsys.readouterr().out


def test_the_master_tells_everything(found, capsys):
    found(OLD, SMALL)
    code, said = told(capsys, 0)
    assert code == 2 and "torch is old" in said and "small disk" in said


def test_the_others_tell_what_concerns_them(found, capsys):
    found(OLD)
    assert told(capsys, 1)[0] == 2 and "torch is old" in told(capsys, 1)[1]
    assert told(capsys, 2) == (2, "host-2: the nodes do not fit together; the output of host-0 says why.\n")


def test_nodes_that_fit_are_told_once(found, capsys):
    found(SMALL)
    code, said = told(capsys, 0)
    assert code == 0 and "small disk" in said and "3 nodes fit together: host-0, host-1, host-2" in said
    assert told(capsys, 1) == (0, "")


def test_a_report_is_one_line_for_the_machine_that_asked(found, capsys, monkeypatch):
    monkeypatch.setattr(one_node, "end_with_input", lambda: None)
    found(OLD)
    code, said = told(capsys, 1, report=True)
    report = json.loads(said)
    assert code == 2 and report["complaints"][0]["host"] == "host-1" and report["fits"] == ""


def test_a_recipe_with_mistakes_is_brought_to_the_meeting(tmp_path):
    assert isinstance(one_node.loaded(tmp_path / "none.yaml", ()), CptError)
    assert one_node.loaded(None, ()) is None
