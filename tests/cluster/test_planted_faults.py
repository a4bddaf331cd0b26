"""Faults of clusters, planted on real hosts: each is named with its host in under a minute, by `cpt doctor` and by
starting the run."""

import os
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from several_hosts import several_hosts
from tiny import write_recipe

pytestmark = pytest.mark.cluster
ROOT = Path(__file__).parents[2]
LIMIT_SECONDS = 60
TORCH_VERSION = Path(torch.__file__).with_name("version.py")
NODES = "host-0,host-1"
PORT = 29500
LOOKING = "Looking whether the 2 nodes fit together"


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    with several_hosts(2, folder=tmp_path_factory.mktemp("hosts")) as started:
        yield started


@pytest.fixture
def corpus_of_its_own(tmp_path):
    """A folder of documents, which a host can be given an empty one for."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "part-0.jsonl").write_text('{"text": "the model reads"}\n' * 40)
    return folder


@pytest.fixture
def recipe(tiny_recipe, corpus_of_its_own, tmp_path):
    (tmp_path / "runs").mkdir()
    tiny_recipe["training"] |= {"use_cpu": True, "bf16": False}
    tiny_recipe["data"] |= {"sources": [{"path": str(corpus_of_its_own)}]}
    return write_recipe(tiny_recipe, tmp_path / "recipe.yaml")


@pytest.fixture
def stranger(hosts):
    """Another program at the master's port, which waits for its visitors to speak first."""
    process = hosts[0].start([sys.executable, "-m", "http.server", str(PORT)])
    until = time.monotonic() + 20
    while time.monotonic() < until and hosts[1].run(["bash", "-c", f"echo > /dev/tcp/host-0/{PORT}"]).returncode:
        time.sleep(0.1)
    yield
    process.kill()
    process.wait(10)


@contextmanager
def unequal_torch(host):
    host.replace(TORCH_VERSION, TORCH_VERSION.read_text().replace(torch.__version__, "2.11.0+cpu"))
    try:
        yield
    finally:
        host.must_run(["umount", str(TORCH_VERSION)])


UNEQUAL_TORCH = f"torch is 2.11.0+cpu, elsewhere {torch.__version__} (host-0)"
TAKEN = f"port {PORT} is taken on this node, the master: process"


def not_shared(recipe: Path) -> str:
    return f"{recipe.parent}/runs, the output folder (`output_dir`), is not the folder that host-0 see under that name"


@pytest.fixture
def record(record_property, request):
    """Takes how long it was until the fault was named, shown with `-s` and kept in the JUnit file.

    What Python's imports of the run took before its check began is told apart: under a minute has to be what the check
    takes.
    """

    def keep(seconds: float, importing: float = 0.0) -> None:
        record_property("seconds", round(seconds, 1))
        record_property("importing", round(importing, 1))
        sys.stdout.write(
            f"\n{request.node.nodeid.partition('::')[2]}: named after {seconds:.1f} s, {importing:.1f} s of them"
            " imports\n"
        )
        assert seconds - importing < LIMIT_SECONDS

    return keep


def doctor(host, recipe: Path, *options: str) -> tuple[str, float]:
    """`cpt doctor --nodes` on that host, which has to find something: what it prints, in one line, and how long it
    took."""
    began = time.monotonic()
    words = [sys.executable, "-m", "cpt", "doctor", str(recipe), "--nodes", NODES, *options]
    result = host.run(words, env={**os.environ, "COLUMNS": "400"}, cwd=ROOT, timeout=120)
    assert result.returncode == 2, result.stdout + result.stderr
    return " ".join(result.stdout.split()), time.monotonic() - began


def on_each(hosts, words_of, tmp_path: Path, complaints: list[str]) -> tuple[list[str], float, float]:
    """Start something on each host at once, all of which have to end with an error.

    Returns:
        Their outputs, the seconds until all complaints were read, and those until the check began.
    """
    logs = [tmp_path / f"{host.name}.log" for host in hosts]
    env = {**os.environ, "COLUMNS": "400", "GLOO_SOCKET_IFNAME": "eth0", "CPT_NODES": NODES}
    began = time.monotonic()
    running = [
        host.start(words_of(node), env={**env, **variables_of_slurm(node)}, cwd=ROOT, log=log)
        for node, (host, log) in enumerate(zip(hosts, logs, strict=True))
    ]
    seen: dict[str, float] = {}
    are_running = True
    while are_running:
        time.sleep(0.1)
        are_running = any(process.poll() is None for process in running)
        said = [" ".join(log.read_text().split()) for log in logs]
        for sign in (LOOKING, *complaints):
            if any(sign in output for output in said):
                seen.setdefault(sign, time.monotonic() - began)
        assert time.monotonic() - began < 4 * LIMIT_SECONDS, said
    assert all(process.returncode for process in running), said
    assert seen.keys() >= set(complaints), said
    return said, max(seen[complaint] for complaint in complaints), seen.get(LOOKING, 0.0)


def variables_of_slurm(node: int) -> dict[str, str]:
    """What a script for `srun` with one process a node sets, as torchrun does for its own."""
    return {
        "RANK": str(node),
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "host-0",
        "MASTER_PORT": str(PORT),
    }


def line_before(recipe: Path, *, ports: tuple[int, int] = (PORT, PORT)):
    """The line that scripts run on each node before the launcher."""

    def words(node: int) -> list[str]:
        options = ["--node-rank", str(node), "--nodes", NODES, "--master", f"host-0:{ports[node]}"]
        return [sys.executable, "-m", "cpt", "doctor", str(recipe), *options]

    return words


def run_of(recipe: Path):
    """The run itself, one process a node."""
    return lambda node: [sys.executable, "cpt/train.py", str(recipe)]


def torchrun_of(recipe: Path, *of_node_1: str):
    """The run by torchrun, started on each node."""
    options = ["--nnodes", "2", "--nproc_per_node", "1", "--master_addr", "host-0", "--master_port", str(PORT)]
    torchrun = [str(Path(sys.executable).with_name("torchrun")), *options]
    return lambda node: [
        *torchrun,
        "--node_rank",
        str(node),
        "cpt/train.py",
        str(recipe),
        *(of_node_1 if node else ()),
    ]


class TestByDoctor:
    """`cpt doctor --nodes` on one of the hosts, which asks the other one by ssh."""

    def test_equal_hosts_fit_together(self, hosts, recipe):
        result = hosts[0].run(
            [sys.executable, "-m", "cpt", "doctor", str(recipe), "--nodes", NODES], cwd=ROOT, timeout=120
        )
        assert result.returncode == 0, result.stdout + result.stderr
        assert "2 nodes fit together: host-0, host-1; an all-reduce of" in result.stdout
        assert not list(recipe.parent.glob("runs/.cpt-preflight*"))

    def test_wrong_port(self, hosts, recipe, record):
        start_up = hosts[1].home / ".bashrc"
        start_up.write_text("export MASTER_PORT=29511\n")
        said, seconds = doctor(hosts[0], recipe)
        start_up.unlink()
        assert "host-1 │ its own environment sets MASTER_PORT=29511, the run meets at 29500" in said
        record(seconds)

    def test_unequal_torch(self, hosts, recipe, record):
        with unequal_torch(hosts[1]):
            said, seconds = doctor(hosts[0], recipe)
        assert f"host-1 │ {UNEQUAL_TORCH}" in said
        record(seconds)

    def test_data_missing_on_one_host(self, hosts, recipe, corpus_of_its_own, record):
        hosts[1].make_private(corpus_of_its_own)
        said, seconds = doctor(hosts[0], recipe)
        assert f"host-1 │ `data.sources[0].path`: {corpus_of_its_own}: the folder holds no" in said
        record(seconds)

    def test_unequal_recipe(self, hosts, recipe, record):
        hosts[1].replace(recipe, recipe.read_text().replace("learning_rate: 0.003", "learning_rate: 0.004"))
        said, seconds = doctor(hosts[0], recipe)
        assert "host-1 │ has another recipe: optimizer.learning_rate is 0.004, elsewhere 0.003 (host-0)" in said
        record(seconds)

    def test_clashing_master_port(self, hosts, recipe, stranger, record):
        said, seconds = doctor(hosts[0], recipe)
        assert f"host-0 │ {TAKEN}" in said and f"http.server {PORT}`) listens there" in said
        record(seconds)

    def test_folder_not_shared(self, hosts, recipe, record):
        hosts[1].make_private(recipe.parent / "runs")
        said, seconds = doctor(hosts[0], recipe)
        assert f"host-1 │ {not_shared(recipe)}" in said
        record(seconds)

    def test_cut_link(self, hosts, recipe, record):
        hosts[1].cut_link()
        said, seconds = doctor(hosts[0], recipe)
        hosts[1].join_link()
        assert "host-1 │ cannot be reached by ssh: ssh: connect to host host-1 port 22:" in said
        record(seconds)

    def test_no_python_there(self, hosts, recipe, record):
        said, seconds = doctor(hosts[0], recipe, "--python", "/no/such/python")
        assert all(f"{host} │ the check does not start there: env: " in said for host in ("host-0", "host-1"))
        record(seconds)


class TestByStartingTheRun:
    """The run itself, or the line that scripts run before the launcher."""

    def test_wrong_port_by_the_line_before_the_launcher(self, hosts, recipe, tmp_path, record):
        complaint = "host-1 │ nothing listens at host-0:29511, where this node was told that the master is"
        said, *seconds = on_each(hosts, line_before(recipe, ports=(PORT, 29511)), tmp_path, [complaint])
        assert (
            "host-1 │ did not come to the master at host-0:29500" in said[0]
            and "told another master or port" in said[0]
        )
        record(*seconds)

    def test_clashing_master_port(self, hosts, recipe, tmp_path, stranger, record):
        said, *seconds = on_each(hosts, run_of(recipe), tmp_path, [f"host-0: {TAKEN}"])
        assert f"host-1: what listens at host-0:{PORT} is not this run's master" in said[1], said
        record(*seconds)

    def test_unequal_torch_recipe_and_data_and_a_folder_not_shared(
        self, hosts, recipe, corpus_of_its_own, tmp_path, record
    ):
        """All four at once, by torchrun, whose agents meet first and hold the master's port."""
        complaints = [
            f"host-1: {UNEQUAL_TORCH}",
            f"host-1: `data.sources[0].path`: {corpus_of_its_own}: the folder holds no",
            "host-1: has another recipe: seed is 7, elsewhere 42 (host-0)",
            f"host-1: {not_shared(recipe)}",
        ]
        hosts[1].make_private(corpus_of_its_own)
        hosts[1].make_private(recipe.parent / "runs")
        with unequal_torch(hosts[1]):
            said, *seconds = on_each(hosts, torchrun_of(recipe, "seed=7"), tmp_path, complaints)
        assert all(complaint in output for complaint in complaints for output in said), said
        record(*seconds)
