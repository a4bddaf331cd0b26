import pytest
from tiny_launch import write_programs

from cpt.errors import LaunchError
from cpt.launchers.hostfile import hostfile_text, named_hosts, read_hostfile, refuse_unreachable


def read(tmp_path, text, nodes=2, gpus=4):
    file = tmp_path / "hosts"
    file.write_text(text)
    return read_hostfile(file, nodes=nodes, gpus_per_node=gpus)


def test_the_first_hosts_are_taken_in_their_order(tmp_path):
    assert read(tmp_path, "# nodes\n\nb slots=4\na.cluster slots=4 # rack 2\nc slots=8\n") == ("b", "a.cluster")


def test_what_is_written_is_read_back(tmp_path):
    assert read(tmp_path, hostfile_text(["b", "a"], 4)) == ("b", "a")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("a slots=4\nb 4\n", r"hosts:2: `b 4` is not a host and its slots. Write: NAME slots=4"),
        ("a slots=4\na slots=4\n", r"hosts:2: a is there twice"),
        ("a slots=4\nb slots=four\n", r"hosts:2: `b slots=four`"),
        ("a slots=4\n-oProxyCommand=x slots=4\n", r"hosts:2: `-oProxyCommand"),
        ("a slots=4\n", r"has 1 host\(s\), --nodes asks for 2"),
        ("", r"has 0 host\(s\)"),
        ("a slots=4\nb slots=2\n", r"asks for 4 slots, but b has 2.*ask for 2"),
        ("a slots=4\nb slots=8\n", r"unequal slots \(a 4, b 8\)"),
    ],
)
def test_a_bad_hostfile_is_named_with_its_line(tmp_path, text, complaint):
    with pytest.raises(LaunchError, match=complaint):
        read(tmp_path, text)


def test_a_hostfile_that_is_not_there_is_named(tmp_path):
    with pytest.raises(LaunchError, match="gone cannot be read: .*No such file"):
        read_hostfile(tmp_path / "gone", nodes=2, gpus_per_node=4)


def test_a_hostfile_that_is_no_text_is_named(tmp_path):
    (tmp_path / "hosts").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(LaunchError, match="hosts cannot be read"):
        read_hostfile(tmp_path / "hosts", nodes=2, gpus_per_node=4)


def test_hosts_are_named_on_the_command_line():
    assert named_hosts("b, a", nodes=2) == ("b", "a")


@pytest.mark.parametrize(
    ("names", "complaint"),
    [
        ("a", "names 1 host"),
        ("a,a", "a is there twice"),
        ("a,", "`` is not the name"),
        ("a,-x", "`-x` is not the name"),
    ],
)
def test_bad_names_are_refused(names, complaint):
    with pytest.raises(LaunchError, match=complaint):
        named_hosts(names, nodes=2)


def test_each_host_that_does_not_answer_is_named_with_what_ssh_says(tmp_path, monkeypatch):
    body = """while [ "$1" != -- ]; do shift; done; [ "$2" = good ] || { echo "ssh: connect to host $2: refused" >&2; exit 255; }"""  # noqa: E501
    monkeypatch.setenv("PATH", f"{write_programs(tmp_path / 'bin', ssh=body)}:/usr/bin:/bin")
    refuse_unreachable(["good"])
    with pytest.raises(
        LaunchError,
        match=r"2 of 3 hosts cannot be reached by ssh:\n  bad: ssh: connect to host bad: refused\n  worse: ",
    ):
        refuse_unreachable(["bad", "good", "worse"])


def test_a_machine_without_ssh_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match="apt-get install openssh-client"):
        refuse_unreachable(["a"])
