import os
import signal
import subprocess
import sys

import pytest
from tiny_launch import environment_with, launch_of, write_all, write_programs

from cpt.launchers.with_torchrun import torchrun_files

# Stands for a run: it says when it is told to stop. The launcher above it would end at once if it were told.
RUN = """
import signal, sys, time
def told(*_):
    print("told", flush=True)
    sys.exit(75)
print("deaf", flush=True)
time.sleep(float(sys.argv[1]))
signal.signal(signal.SIGUSR1, told)
print("ready", flush=True)
time.sleep(60)
"""


def launcher(work, *, deaf=0.0):
    (work / "train.py").write_text(RUN)
    return f'{sys.executable} {work}/train.py {deaf}\necho "the launcher saw $?"\nexit 1'


def started(launch, *arguments, programs):
    write_programs(launch.venv / "bin", **programs)
    write_programs(launch.work / "bin", getent="exit 2")
    write_all(launch, torchrun_files(launch))
    # bash cannot trap what was ignored when it began, as SIGHUP is in tests under nohup
    words = ["env", "--default-signal", "bash", str(launch.folder / "node.sh"), *arguments]
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(words, cwd="/", env=environment_with(launch.work / "bin"), **pipe)


def read_until(process, word):
    seen = []
    for line in process.stdout:
        seen.append(line.strip())
        if word in line:
            return seen
    raise AssertionError(seen)


def test_it_starts_from_the_work_folder_with_the_code_of_the_launcher(tmp_path):
    node = started(launch_of(tmp_path), programs={"torchrun": 'echo "$PWD $OMP_NUM_THREADS $*"; exit 7'})
    output, _ = node.communicate(timeout=20)
    assert node.returncode == 7
    assert output.split()[0] == str(tmp_path) and output.rstrip().endswith("train.py recipe.yaml")
    assert "--nproc-per-node 2" in output and not list(launch_of(tmp_path).folder.glob("*.pid"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP])
def test_a_signal_reaches_the_run_and_not_the_launcher(tmp_path, number):
    node = started(launch_of(tmp_path), programs={"torchrun": launcher(tmp_path)})
    read_until(node, "ready")
    node.send_signal(number)
    output, _ = node.communicate(timeout=20)
    assert output.split("\n")[:2] == ["told", "the launcher saw 75"] and node.returncode == 1


def test_a_run_that_was_not_ready_is_told_again(tmp_path):
    programs = {"torchrun": launcher(tmp_path, deaf=0.2), "sleep": '[ "$1" = 10 ] && set -- 0.1; exec /bin/sleep "$@"'}
    node = started(launch_of(tmp_path), programs=programs)
    read_until(node, "deaf")
    node.send_signal(signal.SIGUSR1)
    assert "told" in node.communicate(timeout=20)[0]


def test_sigusr2_ends_everything_at_once(tmp_path):
    node = started(launch_of(tmp_path), programs={"torchrun": 'trap "" TERM; echo "$BASHPID"; sleep 60 & wait'})
    pid = int(node.stdout.readline())
    node.send_signal(signal.SIGUSR2)
    node.communicate(timeout=20)
    assert node.returncode == 137
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_on_several_nodes_the_cluster_is_checked_first(tmp_path):
    launch = launch_of(tmp_path, nodes=2, lora=True)
    programs = {"python": 'echo "python $*"', "torchrun": 'echo "torchrun $* $CPT_NODES $CPT_PREFLIGHT_SECONDS"'}
    output, _ = started(launch, "1", programs=programs).communicate(timeout=20)
    checked, run = output.splitlines()
    assert checked == "python -m cpt doctor recipe.yaml --node-rank 1 --nodes node-0,node-1 --master node-0:29500"
    assert "--node-rank 1 --nproc-per-node 2 --master-addr node-0 --master-port 29500" in run and run.endswith(
        "--lora node-0,node-1 0"
    )


def test_a_check_that_fails_starts_nothing(tmp_path):
    node = started(launch_of(tmp_path, nodes=2), "0", programs={"python": "exit 2", "torchrun": "echo started"})
    output, _ = node.communicate(timeout=20)
    assert node.returncode == 2 and "started" not in output


def test_who_is_told_to_stop_during_the_check_starts_nothing(tmp_path):
    programs = {"python": "echo checking; sleep 0.2", "torchrun": "echo started"}
    node = started(launch_of(tmp_path, nodes=2), "0", programs=programs)
    read_until(node, "checking")
    node.send_signal(signal.SIGTERM)
    output, _ = node.communicate(timeout=20)
    assert node.returncode == 75 and "started" not in output


def test_a_node_of_several_must_be_told_which_it_is(tmp_path):
    node = started(launch_of(tmp_path, nodes=2), programs={})
    assert "which node of the hostfile is this?" in node.communicate(timeout=20)[0] and node.returncode


def test_a_hostfile_that_was_edited_counts(tmp_path):
    launch = launch_of(tmp_path, nodes=2)
    programs = {"python": "true", "torchrun": 'echo "$CPT_NODES $MASTER_ADDR"'}
    started(launch, "0", programs=programs).communicate(timeout=20)
    (launch.folder / "hostfile").write_text("  # mine\n\nc slots=2 # new\na slots=2\nspare slots=2\n")
    again = subprocess.run(
        ["bash", str(launch.folder / "node.sh"), "0"],
        env=environment_with(tmp_path / "bin"),
        capture_output=True,
        text=True,
    )
    assert again.stdout == "c,a c\n"
