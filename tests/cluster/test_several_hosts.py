"""Runs on two hosts of this machine (tests/several_hosts.py): the same as on one, and what becomes of them when a host
is lost."""

import time

import pytest
from host_runs import EVERY, PAUSED, SECONDS_TO_WAIT_FOR_OTHERS, STEPS, run_on_hosts
from launching import BIN, ROOT
from several_hosts import PACKAGES, complain_about_what_is_missing, several_hosts, wait_for

from cpt.runs.events import read_events
from cpt.stages.failures import SECONDS_FOR_AN_ANSWER

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]
SECONDS_TO_NOTICE = SECONDS_TO_WAIT_FOR_OTHERS + SECONDS_FOR_AN_ANSWER + 15


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    with several_hosts(2, folder=tmp_path_factory.mktemp("hosts")) as hosts:
        yield hosts


@pytest.fixture(scope="module")
def run_of(hosts, tmp_path_factory, corpus, tokenizer_folder):
    """Makes a run on the two hosts."""
    folder = tmp_path_factory.mktemp("shared")
    return lambda name, stage: run_on_hosts(hosts, folder, (corpus, tokenizer_folder), name, stage=stage)


@pytest.fixture(scope="module")
def on_one_host(hosts, run_of):
    """ZeRO stage -> the undisturbed run of two processes on one host; made once each."""
    made = {}

    def of(stage):
        if stage not in made:
            made[stage] = run_of(f"one-{stage}", stage)
            made[stage].must_end_well(made[stage].two_on(hosts[0]))
            assert len(made[stage].losses()) == STEPS == len(made[stage].rows())
        return made[stage]

    return of


@pytest.fixture(autouse=True)
def all_are_on(hosts):
    """A test may leave a host without power, or with processes of its own."""
    yield
    for host in hosts:
        if host.started and host.is_on:
            host.power_off()
        if not host.is_on:
            host.power_on()


def is_the_same(run, straight, relative=0.0):
    """The same rows in each step and the same losses, bit for bit unless an accuracy is stated."""
    assert run.rows() == straight.rows()
    assert run.losses() == (pytest.approx(straight.losses(), rel=relative) if relative else straight.losses())
    assert run.status()["state"] == "finished"
    return True


# --- the hosts themselves --------------------------------------------------------------------------------------------


def test_each_host_has_a_name_a_network_processes_and_mounts_of_its_own(hosts, tmp_path):
    zero, one = hosts
    assert zero.run(["ssh", "host-1", "hostname; hostname -I; id -un"]).stdout.split() == [
        "host-1",
        one.address,
        "root",
    ]
    assert one.run(["ssh", "host-0", "ls /sys/class/net"]).stdout.split() == ["eth0", "lo"]
    assert (
        zero.run(["ps", "-o", "comm=", "1"]).stdout.strip() == "sshd" and "sleep" not in zero.run(["ps", "ax"]).stdout
    )
    shared, file = tmp_path / "shared", tmp_path / "recipe.yaml"
    shared.mkdir()
    (shared / "a").touch()
    file.write_text("name: a")
    one.make_private(shared)
    one.replace(file, "name: b")
    assert (zero.run(["ls", str(shared)]).stdout, one.run(["ls", str(shared)]).stdout) == ("a\n", "")
    assert (zero.run(["cat", str(file)]).stdout, one.run(["cat", str(file)]).stdout) == ("name: a", "name: b")
    one.power_off()
    one.power_on()
    assert one.run(["cat", str(file)]).stdout == "name: a" and zero.run(["ssh", "host-1", "true"]).returncode == 0


def test_a_link_can_be_cut_and_a_host_frozen(hosts, tmp_path):
    zero, one = hosts
    reach = ["ping", "-c", "1", "-W", "1", "host-1"]
    one.cut_link()
    assert zero.run(reach).returncode != 0
    one.join_link()
    assert zero.run(reach).returncode == 0
    ticks = tmp_path / "ticks"
    ticking = one.start(["bash", "-c", "while echo; do sleep 0.1; done"], log=ticks)
    wait_for(lambda: ticks.exists() and ticks.stat().st_size, "no tick")
    one.freeze()
    before = ticks.stat().st_size
    time.sleep(0.5)
    assert ticks.stat().st_size == before
    one.thaw()
    wait_for(lambda: ticks.stat().st_size > before, "it does not go on")
    ticking.terminate()
    assert ticking.wait(5) == -15, "signals reach the process itself"


def test_what_is_missing_is_named_with_its_package(monkeypatch):
    monkeypatch.setattr("several_hosts.PACKAGES", {**PACKAGES, "no-such-program": "its-package"})
    with pytest.raises(RuntimeError, match="apt-get install its-package"):
        complain_about_what_is_missing()


# --- runs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [2, 3])
def test_deepspeeds_launcher_on_two_hosts_trains_as_on_one(run_of, on_one_host, stage):
    run = run_of(f"deepspeed-{stage}", stage)
    run.must_end_well(run.by_deepspeed())
    assert "host-1: " in run.said(), "its launcher puts the host before each line"
    assert is_the_same(run, on_one_host(stage))


def test_a_host_without_power_is_named_and_the_run_goes_on_without_it(hosts, run_of, on_one_host):
    run = run_of("power", 2)
    launched = run.by_torchrun(pause=True)
    run.await_step(PAUSED, launched[0])
    hosts[1].power_off()
    began = time.monotonic()
    assert launched[0].wait(120) != 0
    assert time.monotonic() - began < SECONDS_TO_NOTICE
    status, (event,) = run.status(), read_events(run.run)
    assert (
        "host-1 (process 1) is gone" in status["message"]
        and f"goes on from checkpoint-{2 * EVERY}" in status["message"]
    )
    assert (status["state"], status["error"], event["kind"], event["message"]) == (
        "failed",
        "LaunchError",
        "lost",
        status["message"],
    )
    assert f"LaunchError: {status['message']}" in run.log("host-0").read_text(), (
        "the last word of the log, without a traceback of ours"
    )

    run.must_end_well(*run.by_torchrun(hosts[:1]))
    assert is_the_same(run, on_one_host(2), relative=2e-6)
    assert run.steps_of_start(2) == set(range(2 * EVERY + 1, STEPS + 1)), (
        "nothing was done twice but what no checkpoint had"
    )
    assert [event["kind"] for event in read_events(run.run)] == ["lost", "elastic"]


def test_a_cut_link_ends_both_sides_and_the_run_goes_on_when_it_is_back(hosts, run_of, on_one_host):
    run = run_of("link", 3)
    launched = run.by_torchrun(pause=True)
    run.await_step(PAUSED, launched[0])
    hosts[1].cut_link()
    began = time.monotonic()
    assert [process.wait(120) != 0 for process in launched] == [True, True]
    assert time.monotonic() - began < SECONDS_TO_NOTICE
    message = run.status()["message"]
    assert (
        "lost each other" in message
        and "host-0 (process 0) and host-1 (process 1)" in message
        and "ddp_timeout" in message
    )
    hosts[1].join_link()
    run.must_end_well(*run.by_torchrun())
    assert is_the_same(run, on_one_host(3))


def test_supervisors_on_both_hosts_bring_a_run_back_after_a_reboot(hosts, run_of, on_one_host):
    run = run_of("reboot", 2)
    launched = run.by_torchrun(pause=True, supervise=True)
    run.await_step(PAUSED, launched[0])
    hosts[1].power_off(last_words=True)
    hosts[1].power_on()
    words, environment = run.words(hosts[1], hosts, supervise=True), run.environment()
    again = hosts[1].start(words, env=environment, cwd=ROOT, log=run.log("host-1-again"))
    run.must_end_well(launched[0], again)
    assert is_the_same(run, on_one_host(2)), "with both hosts again: bit for bit"
    events = [(event["kind"], event["message"]) for event in read_events(run.run)]
    assert [kind for kind, _ in events] == ["lost", "restart"] and "host-1 (process 1) is gone" in events[1][1]


# --- wider -----------------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_torchrun_on_two_hosts_trains_as_on_one(run_of, on_one_host, stage):
    run = run_of(f"torchrun-{stage}", stage)
    run.must_end_well(*run.by_torchrun())
    assert is_the_same(run, on_one_host(stage))


@pytest.mark.long
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("event", ["power", "reboot", "frozen"])
def test_whichever_host_is_lost_the_other_one_says_so_and_goes_on_alone(
    hosts, run_of, on_one_host, stage, lost, event
):
    run, straight = run_of(f"{event}-{lost}-{stage}", stage), on_one_host(stage)
    launched = run.by_torchrun(pause=True)
    run.await_step(PAUSED, launched[0])
    {
        "power": hosts[lost].power_off,
        "reboot": lambda: hosts[lost].power_off(last_words=True),
        "frozen": hosts[lost].freeze,
    }[event]()
    began = time.monotonic()
    assert launched[1 - lost].wait(120) != 0 and time.monotonic() - began < SECONDS_TO_NOTICE
    assert f"host-{lost} (process {lost}) is gone" in run.status()["message"]
    if event == "frozen":
        hosts[lost].power_off()
    run.must_end_well(*run.by_torchrun([hosts[1 - lost]]))
    assert is_the_same(run, straight, relative=2e-6)


@pytest.mark.long
def test_supervisors_see_a_frozen_host_long_before_the_others_give_up(hosts, run_of, on_one_host):
    run = run_of("supervised", 0)
    run.recipe.write_text(
        run.recipe.read_text().replace(f"ddp_timeout: {SECONDS_TO_WAIT_FOR_OTHERS}", "ddp_timeout: 1800")
    )
    launched = run.by_torchrun(pause=True, supervise=True)
    run.await_step(PAUSED, launched[0])
    hosts[1].freeze()
    time.sleep(50)
    hosts[1].power_off()
    hosts[1].power_on()
    words, environment = run.words(hosts[1], hosts, supervise=True), run.environment()
    run.must_end_well(launched[0], hosts[1].start(words, env=environment, cwd=ROOT, log=run.log("host-1-again")))
    assert is_the_same(run, on_one_host(0))
    hang = read_events(run.run)[0]
    assert hang["kind"] == "hang" and "host-1 (process 1) gives no sign of life" in hang["message"]


@pytest.mark.long
def test_a_signal_to_one_supervisor_stops_the_run_on_all_hosts_after_a_save(hosts, run_of, on_one_host):
    run = run_of("stopped", 2)
    launched = run.by_torchrun(pause=True, supervise=True)
    run.await_step(PAUSED, launched[0])
    launched[1].terminate()
    assert [process.wait(60) for process in launched] == [75, 75], run.said()
    assert run.status()["state"] == "interrupted" and int(run.status()["checkpoint"].split("-")[1]) >= PAUSED
    run.must_end_well(*run.by_torchrun())
    assert is_the_same(run, on_one_host(2))


@pytest.mark.long
@pytest.mark.parametrize("last_words", [True, False])
def test_deepspeeds_launcher_ends_when_a_host_is_lost(hosts, run_of, last_words):
    run = run_of(f"deepspeed-lost-{last_words}", 2)
    with (hosts[0].home / ".ssh" / "config").open("a") as config:
        config.write("    ServerAliveInterval 5\n    ServerAliveCountMax 3\n")
    launched = run.by_deepspeed(pause=True)
    run.await_step(PAUSED, launched)
    hosts[1].power_off(last_words=last_words)
    assert launched.wait(SECONDS_TO_NOTICE + 15) != 0
    assert "host-1 (process 1) is gone" in run.status()["message"]


@pytest.mark.long
def test_torchrun_goes_on_by_itself_with_the_hosts_that_are_left(hosts, run_of, on_one_host):
    run = run_of("elastic", 0)
    elastic = [
        str(BIN / "torchrun"),
        "--nproc_per_node=1",
        "--nnodes=1:2",
        "--max_restarts=3",
        "--rdzv_backend=c10d",
        "--rdzv_id=one",
    ]
    words = [*elastic, f"--rdzv_endpoint={hosts[0].address}:29400", "cpt/train.py", str(run.recipe)]
    run.starts = 1
    launched = [host.start(words, env=run.environment(pause=True), cwd=ROOT, log=run.log(host.name)) for host in hosts]
    run.await_step(PAUSED, launched[0])
    hosts[1].power_off()
    run.must_end_well(launched[0])
    assert run.losses() == pytest.approx(on_one_host(0).losses(), rel=2e-6) and run.status()["state"] == "finished"
    assert [event["kind"] for event in read_events(run.run)] == ["lost", "elastic"]
