"""What ssh and the other side say when the check cannot start there, and how the nodes' reports become one."""

import json
import os
import time

import pytest

from cpt.cluster.complaint import Complaint, as_lines
from cpt.cluster.over_ssh import Wish, check_over_ssh
from cpt.errors import ResourceError

OLD = Complaint("node-b", "torch is old", "Install it.")
ABSENT = Complaint("node-b", "did not come to the master", "It was not started.")


@pytest.fixture
def ssh(tmp_path, monkeypatch):
    """Let `ssh NODE` run a line of bash for that node."""

    def answers(**lines: str) -> Wish:
        cases = "".join(f"{name.replace('_', '-')}) {line};;\n" for name, line in lines.items())
        program = tmp_path / "ssh"
        program.write_text(f'#!/bin/bash\nwhile [ "$1" != -- ]; do shift; done\ncase "$2" in\n{cases}esac\n')
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        return Wish(["r.yaml"], ["node-a", "node-b"], 29500, tmp_path, "python3", seconds=0.5)

    monkeypatch.setattr("cpt.cluster.over_ssh.SECONDS_FOR_THE_OTHERS", 0.3)
    monkeypatch.setattr("cpt.cluster.over_ssh.SECONDS_MORE", 0.5)
    return answers


def report(*complaints: Complaint, fits: str = "") -> str:
    text = json.dumps({"complaints": as_lines(complaints), "fits": fits})
    return f"echo '{text}'; exit {2 if complaints else 0}"


def test_equal_reports_are_told_once(ssh):
    assert check_over_ssh(ssh(node_a=report(OLD), node_b=report(OLD))) == ([OLD], "")


def test_nodes_that_fit_say_so(ssh):
    fits = report(fits="2 nodes fit together")
    assert check_over_ssh(ssh(node_a=fits, node_b=fits)) == ([], "2 nodes fit together")


@pytest.mark.parametrize(
    ("said", "remedy"),
    [
        ("ssh: connect to host node-b port 22: Connection refused", "Start sshd there"),
        ("ssh: Could not resolve hostname node-b: Name or service not known", "/etc/hosts"),
        ("root@node-b: Permission denied (publickey).", "ssh-copy-id node-b"),
        ("Host key verification failed.", "ssh-keyscan node-b"),
        ("ssh: connect to host node-b port 22: Connection timed out", "It is off"),
    ],
)
def test_what_ssh_says_is_the_cause_and_what_follows_from_it_is_not_told(ssh, said, remedy):
    (complaint,), fits = check_over_ssh(ssh(node_a=report(ABSENT), node_b=f"echo '{said}' >&2; exit 255"))
    assert (
        complaint.host == "node-b"
        and complaint.cause == f"cannot be reached by ssh: {said}"
        and remedy in complaint.remedy
    )
    assert fits == ""


def test_a_python_that_is_not_there_is_told(ssh):
    there = "echo 'env: /opt/python: No such file or directory' >&2; exit 127"
    (complaint,), _ = check_over_ssh(ssh(node_a="exec sleep 60", node_b=there))
    assert complaint.host == "node-b" and "does not start there: env: /opt/python: No such file" in complaint.cause


def test_nodes_that_hang_are_ended_and_named(ssh):
    began = time.monotonic()
    complaints, _ = check_over_ssh(ssh(node_a="exec sleep 60", node_b="exec sleep 60"))
    assert [(complaint.host, complaint.cause) for complaint in complaints] == [
        ("node-a", "did not answer in time"),
        ("node-b", "did not answer in time"),
    ]
    assert time.monotonic() - began < 5


def test_the_line_on_the_other_side_is_quoted(ssh, tmp_path):
    wish = ssh(node_a='echo "$3" > $(dirname $0)/line; exit 255', node_b="exit 255")
    check_over_ssh(Wish(["a b.yaml", "name=x;y"], wish.nodes, 29500, tmp_path / "with space", "python3", 0.5))
    line = (tmp_path / "line").read_text()
    assert line.startswith(f"cd '{tmp_path}/with space' && exec env ")
    assert (
        "-m cpt doctor 'a b.yaml' 'name=x;y' --nodes node-a,node-b --node-rank 0 --master node-a:29500 --report"
        in line
    )


def test_a_machine_without_ssh_is_told(ssh, tmp_path, monkeypatch):
    wish = ssh()
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    with pytest.raises(ResourceError, match="apt-get install openssh-client"):
        check_over_ssh(wish)
