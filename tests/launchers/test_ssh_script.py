import signal
import subprocess

from tiny_launch import environment_with, launch_of, write_all, write_programs

from cpt.launchers.with_torchrun import torchrun_files

# Stands for ssh: runs the last word here, as host $HOST; the host `gone` does not answer.
SSH = """
while [ $# -gt 2 ]; do shift; done
[ "$1" != gone ] || { echo "ssh: connect to host gone port 22: No route to host" >&2; exit 255; }
HOST=$1 exec bash -c "$2"
"""


def started(tmp_path, node, *, hosts=("a", "b"), seconds=60):
    """start.sh with this in the place of node.sh, looking more often."""
    launch = launch_of(tmp_path, nodes=2, hosts=hosts)
    write_all(launch, torchrun_files(launch))
    (launch.folder / "node.sh").write_text(f'echo "$$" > launch/x/node-$1.pid\n{node}\n')
    script = launch.folder / "start.sh"
    text = (
        script.read_text()
        .replace("SECONDS_FOR_THE_OTHERS=60", f"SECONDS_FOR_THE_OTHERS={seconds}")
        .replace("sleep 1 ", "sleep 0.1 ")
    )
    script.write_text(text)
    programs = write_programs(tmp_path / "bin", ssh=SSH)
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(
        ["env", "--default-signal", "bash", str(script)], cwd="/", env=environment_with(programs), **pipe
    )


def test_each_host_runs_its_node_and_has_its_name_in_front(tmp_path):
    start = started(tmp_path, 'echo "node $1 in $PWD"')
    output, _ = start.communicate(timeout=20)
    assert (
        sorted(output.splitlines()) == [f"a: node 0 in {tmp_path}", f"b: node 1 in {tmp_path}"]
        and start.returncode == 0
    )


def test_when_one_fails_the_others_are_ended(tmp_path):
    start = started(
        tmp_path, '[ "$1" = 0 ] && exit 3; trap "echo ended; exit 1" USR2; while :; do sleep 0.03; done', seconds=0
    )
    output, _ = start.communicate(timeout=20)
    assert start.returncode == 3
    lines = output.splitlines()
    assert lines[:2] == ["a (node 0) ended with code 3.", "The other nodes are ended."] and "b: ended" in lines


def test_a_host_that_is_lost_is_named(tmp_path):
    start = started(tmp_path, "trap 'exit 0' USR2; while :; do sleep 0.03; done", hosts=("a", "gone"), seconds=0)
    output, _ = start.communicate(timeout=20)
    assert "gone: ssh: connect to host gone port 22: No route to host" in output
    assert "gone (node 1) ended with code 255. ssh lost it." in output and start.returncode == 255


def test_told_to_stop_it_tells_all_nodes_and_waits_for_them(tmp_path):
    start = started(tmp_path, 'trap "echo saved; exit 0" USR1; echo ready; while :; do sleep 0.03; done')
    assert sorted(start.stdout.readline() for _ in "ab") == ["a: ready\n", "b: ready\n"]
    start.send_signal(signal.SIGTERM)
    output, _ = start.communicate(timeout=20)
    assert (
        sorted(output.splitlines()) == ["The run is told to save and end.", "a: saved", "b: saved"]
        and start.returncode == 0
    )


def test_told_twice_it_ends_all_at_once(tmp_path):
    start = started(tmp_path, 'trap "" USR1; trap "exit 9" USR2; echo ready; while :; do sleep 0.03; done')
    assert {start.stdout.readline() for _ in "ab"} == {"a: ready\n", "b: ready\n"}
    start.send_signal(signal.SIGINT)
    assert start.stdout.readline() == "The run is told to save and end.\n"
    start.send_signal(signal.SIGINT)
    start.communicate(timeout=20)
    assert start.returncode == 9


def test_it_shows_how_the_run_ended(tmp_path):
    (tmp_path / "runs" / "tiny").mkdir(parents=True)
    (tmp_path / "runs" / "tiny" / "status.json").write_text(
        '{\n  "state": "interrupted",\n  "message": "stopped by SIGUSR1"\n}\n'
    )
    output, _ = started(tmp_path, "exit 1").communicate(timeout=20)
    assert '"state": "interrupted"' in output and '"message": "stopped by SIGUSR1"' in output
