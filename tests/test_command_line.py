import errno
import json
import logging
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer
from tiny import write_recipe

from cpt.command_line import CACHES, NO_TELEMETRY, mistyped_paths_told, run_app, show_log
from cpt.errors import DataError, ResourceError


def failing(message):
    app = typer.Typer()

    @app.command()
    def command() -> None:
        raise DataError(message)

    return app


def test_the_main_process_prints_the_error_and_ends_with_code_2(capsys):
    with pytest.raises(SystemExit) as ended:
        run_app(failing("a.txt is empty"), [])
    assert ended.value.code == 2 and capsys.readouterr().err == "DataError: a.txt is empty\n"


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("file/status.json", "ResourceError: file/status.json: Not a directory. Name another path."),
        ("a" * 300, f"ResourceError: {'a' * 100}...{'a' * 100}: File name too long. Name another path."),
        ("itself", "ResourceError: itself: Too many levels of symbolic links. Name another path."),
    ],
)
def test_a_path_that_can_name_nothing_is_told_without_a_traceback(tmp_path, monkeypatch, capsys, path, said):
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    Path("itself").symlink_to("itself")
    app = typer.Typer()
    app.command()(lambda: Path(path).read_text())
    with pytest.raises(SystemExit) as ended:
        run_app(app, [])
    assert ended.value.code == 2 and capsys.readouterr().err.strip() == said


def test_other_errors_of_the_system_keep_their_traceback(tmp_path):
    app = typer.Typer()
    app.command()(lambda: (tmp_path / "gone").read_text())
    with pytest.raises(FileNotFoundError):
        run_app(app, [])


@pytest.mark.parametrize(
    ("path", "variable"),
    [
        (".cache/cpt/tokens/x", "CPT_CACHE"),
        (".cache/huggingface/hub", "HF_HOME"),
        (".cache/torch_extensions/py311", "TORCH_EXTENSIONS_DIR"),
        (".cache", "XDG_CACHE_HOME"),
        (".triton/cache", "TRITON_CACHE_DIR"),
    ],
)
@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.ENOSPC])
def test_a_folder_below_home_that_cannot_be_written_is_named_with_the_variable_that_moves_it(
    path, variable, number, tmp_path, monkeypatch
):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in CACHES:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ResourceError, match=f"export {variable}=") as error, mistyped_paths_told():
        raise OSError(number, os.strerror(number), str(tmp_path / path))
    assert str(tmp_path / path) in str(error.value)


def test_a_home_without_a_cache_folder_ends_a_run_with_the_remedy_and_the_remedy_works(tiny_recipe, tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / ".cache").touch()  # a file in its place: root may write everywhere else
    words = [sys.executable, "-m", "cpt", "prepare", str(write_recipe(tiny_recipe, tmp_path / "r.yaml"))]
    environment = {name: value for name, value in os.environ.items() if name != "CPT_CACHE"} | {
        "HOME": str(tmp_path / "home")
    }
    ended = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 2 and "export CPT_CACHE=" in ended.stderr and "Traceback" not in ended.stderr
    moved = subprocess.run(
        words, env={**environment, "CPT_CACHE": str(tmp_path / "store")}, capture_output=True, text=True, check=False
    )
    assert moved.returncode == 0, moved.stderr


def test_an_output_on_a_full_disk_is_told_in_a_line():
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "cpt", "--help"], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert ended.returncode == 2
    assert (
        ended.stderr
        == "ResourceError: a file or the output cannot be written: no space left on its disk. Free some.\n"
    )


NOBODY_READS = (
    "import os; r, w = os.pipe(); os.close(r); os.dup2(w, 1); os.dup2(w, 2); os.execv({0!r}, [{0!r}, *{1!r}])"
)


def run_unread(*words):
    """Both outputs are a pipe whose reader is gone."""
    program = NOBODY_READS.format(sys.executable, words)
    return subprocess.run([sys.executable, "-c", program], check=False).returncode


PRINTS = """
import sys, typer
from cpt.command_line import run_app
app = typer.Typer()
@app.command()
def command():
    for line in range(10_000):
        print(line), print(line, file=sys.stderr)
    sys.exit(7)
run_app(app, [], outlives_readers={})
"""


@pytest.mark.parametrize(("outlives_readers", "code"), [(True, 7), (False, 1)])
def test_a_long_command_ends_as_usual_where_nobody_reads_it_and_a_short_one_at_once(outlives_readers, code):
    assert run_unread("-c", PRINTS.format(outlives_readers)) == code
    assert run_unread("-u", "-c", PRINTS.format(outlives_readers)) == code


def test_a_long_command_on_a_full_disk_ends_as_usual():
    with open("/dev/full", "w") as full:
        ended = subprocess.run([sys.executable, "-c", PRINTS.format(True)], stdout=full, stderr=full, check=False)
    assert ended.returncode == 7


@pytest.mark.parametrize("words", ["schema", "--help"])
def test_a_short_command_whose_reader_is_gone_ends_quietly(words):
    ended = subprocess.run(
        ["sh", "-c", f'"{sys.executable}" -m cpt {words} | true'], stderr=subprocess.PIPE, text=True, check=False
    )
    assert ended.stderr == ""


def test_a_run_that_nobody_reads_is_trained_to_its_end(tiny_recipe, tmp_path):
    recipe = write_recipe(tiny_recipe, tmp_path / "r.yaml")
    assert run_unread("-m", "cpt", "train", str(recipe)) == 0
    status = json.loads((tmp_path / "runs" / "tiny" / "status.json").read_text())
    assert status["state"] == "finished" and (tmp_path / "runs" / "tiny" / "final" / "model.safetensors").exists()


def test_an_output_that_is_closed_is_no_error():
    ended = subprocess.run(
        ["sh", "-c", f'exec "{sys.executable}" -m cpt recipes >&-'], stderr=subprocess.PIPE, text=True, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "")


def test_what_the_terminal_s_encoding_lacks_ends_nothing():
    program = (
        "import typer; from cpt.command_line import run_app; app = typer.Typer(); app.command()(lambda: print('größer"
        " → 2')); run_app(app)"
    )
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    ended = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, b"gr??er ? 2\n", b"")


def test_another_process_lets_the_main_one_speak_first(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr("cpt.command_line.SECONDS_FOR_THE_MAIN_PROCESS", 0.2)
    begun = time.perf_counter()
    with pytest.raises(SystemExit) as ended:
        run_app(failing("a.txt is empty"), [])
    assert time.perf_counter() - begun >= 0.2
    assert ended.value.code == 2 and capsys.readouterr().err == "process 1: DataError: a.txt is empty\n"


def test_information_is_shown_once_and_warnings_always(capsys):
    show_log()
    log = logging.getLogger("cpt")
    for _ in range(2):
        log.info("domain: 12 documents")
        log.warning("a file is missing")
    assert capsys.readouterr().out == "domain: 12 documents\na file is missing\na file is missing\n"


@pytest.mark.parametrize("asked", [False, True])
def test_nothing_is_sent_to_anybody_unless_the_environment_asks_for_it(asked):
    """What the packages make of these variables, in a process of its own: most read them when they are imported."""
    program = (
        "import cpt.command_line; from huggingface_hub import constants; from datasets import config;"
        "print(constants.HF_HUB_DISABLE_TELEMETRY, config.HF_UPDATE_DOWNLOAD_COUNTS)"
    )
    own = {"HF_HUB_DISABLE_TELEMETRY": "0", "HF_UPDATE_DOWNLOAD_COUNTS": "1"} if asked else {}
    environment = {name: value for name, value in os.environ.items() if name not in NO_TELEMETRY} | own
    said = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    ).stdout
    assert said.split() == (["False", "True"] if asked else ["True", "False"])


def test_wandb_and_ray_know_the_names():
    wandb = pytest.importorskip("wandb.env")
    assert wandb.ERROR_REPORTING in NO_TELEMETRY and not wandb.error_reporting_enabled()
    usage = pytest.importorskip("ray._common.usage.usage_constants")
    assert usage.USAGE_STATS_ENABLED_ENV_VAR in NO_TELEMETRY


def test_deepspeed_does_not_tell_each_command_that_there_is_no_gpu():
    log = logging.getLogger("DeepSpeed")
    told = [
        "Setting accelerator to CPU. If you have GPU or other accelerator, we were unable to detect it.",
        "loss scale is 1",
    ]
    kept = [text for text in told if log.filter(logging.makeLogRecord({"name": "DeepSpeed", "msg": text}))]
    assert kept == told[1:]


def test_a_closed_output_is_no_descriptor_that_a_socket_of_a_child_may_take():
    inner = (
        f'{sys.executable} -c \'import os, socket; print(socket.socket().fileno(), file=open("/dev/stderr", "w"))\''
    )
    program = f"from cpt.output import make_output_safe; import os; make_output_safe(); os.system({inner!r})"
    ended = subprocess.run(
        ["sh", "-c", f"exec {shlex.quote(sys.executable)} -c {shlex.quote(program)} >&-"],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert int(ended.stderr) > 2
