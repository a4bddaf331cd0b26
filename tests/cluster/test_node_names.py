"""Nodes are named by commas or by a hostfile; what is no name is refused before anything starts."""

import pytest

from cpt.cluster.node_names import read_nodes
from cpt.errors import LaunchError


def test_names_by_commas():
    assert read_nodes("host-0, host-1") == ("host-0", "host-1")


def test_names_of_a_hostfile(tmp_path):
    (tmp_path / "hostfile").write_text("# our nodes\nhost-0 slots=8\n\nhost-1 slots=8  # the second\n")
    assert read_nodes(str(tmp_path / "hostfile")) == ("host-0", "host-1")


@pytest.mark.parametrize(
    ("written", "complaint"),
    [
        ("host-0", "one node has nothing to be compared with"),
        ("host-0,host-0", "host-0 is there twice"),
        ("host-0,-oProxyCommand=x", "is not the name of a host"),
        ("host-0,,host-1", "is not the name of a host"),
    ],
)
def test_wrong_names_are_refused(written, complaint):
    with pytest.raises(LaunchError, match=complaint):
        read_nodes(written)
