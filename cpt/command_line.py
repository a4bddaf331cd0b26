"""Run a typer command; a CptError is printed once, without a traceback, and its class gives the exit code."""

import errno
import json
import logging
import os
import resource
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from io import BufferedWriter, FileIO, TextIOWrapper
from pathlib import Path
from typing import Annotated, Any

import typer

from cpt.distributed import has_process_group, is_main_process, leave, rank
from cpt.errors import CheckpointError, CptError, Interrupted, RecipeError, ResourceError
from cpt.formatting import set_plain_output
from cpt.interrupts import SUPERVISED

SECONDS_FOR_THE_MAIN_PROCESS = 5

# If bitsandbytes, torchao and DeepSpeed are installed, peft and transformers import them, and they warn on machines
# without a GPU.
for library in ("bitsandbytes.backends.cpu.ops", "torchao", "torch.utils._pytree"):
    logging.getLogger(library).setLevel(logging.ERROR)
logging.getLogger("DeepSpeed").addFilter(
    lambda record: not record.getMessage().startswith("Setting accelerator to CPU")
)
os.environ.setdefault(
    "TRL_EXPERIMENTAL_SILENCE", "1"
)  # docs/reference/training.md names TRL's experimental stages
# Lets freed GPU memory be reused for blocks of other sizes; the 24 GB recipes need that. torch reads it when CUDA
# starts.
if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

NO_TELEMETRY = {
    "HF_HUB_DISABLE_TELEMETRY": "1",  # also for transformers, TRL, trackio and gradio
    "HF_UPDATE_DOWNLOAD_COUNTS": "0",
    "WANDB_ERROR_REPORTING": "false",
    "GRADIO_ANALYTICS_ENABLED": "False",
    "RAY_USAGE_STATS_ENABLED": "0",
}
"""Disable telemetry unless the user's environment enables it. Most packages read these at import."""
for variable, off in NO_TELEMETRY.items():
    os.environ.setdefault(variable, off)
set_plain_output(os.environ, on_terminal=sys.stderr is not None and sys.stderr.isatty())

ERRORS_OF_TYPOS = (errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.ELOOP)
ERRORS_OF_WRITING = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT)
ERRORS_OF_MEMORY = (  # of the loader, of system calls, of torch, of Python's threads
    "failed to map segment from shared object",
    "cannot allocate memory",
    "Cannot allocate memory",
    "can't allocate memory",
    "can't start new thread",
)
NAMES_OF_HELP = {"help_option_names": ["--help", "-h"]}

# Arguments of several commands.
RecipePath = Annotated[Path, typer.Argument(help="The recipe's YAML file.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="key.path=value, any key of the recipe.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
Force = Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")]
Gpu = Annotated[
    str | None,
    typer.Option(help='"RTX 4090", A100-80GB, H100, ...; or cpu. Default: this machine.'),
]
Lora = Annotated[bool, typer.Option("--lora", help="Train a LoRA adapter with our defaults.")]
Supervise = Annotated[bool, typer.Option("--supervise", help="Restart a run that hangs or dies.")]
TaskFolder = Annotated[Path | None, typer.Option(help="Folder of YAML files with lm-eval tasks.")]
Processes = Annotated[
    int, typer.Option(min=1, help="Processes of a run on this machine, one per GPU.")
]
Launcher = Annotated[str | None, typer.Option(help='Or a launcher, such as "accelerate launch".')]
LocalRank = Annotated[
    int | None, typer.Option("--local_rank", hidden=True, help="DeepSpeed's launcher passes it.")
]


def run_command(function: Callable[..., None]) -> None:
    """Run a function as a command, as `python cpt/train.py` does."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(context_settings=NAMES_OF_HELP)(function)
    run_app(app, outlives_readers=True)


def run_app(
    app: Callable[..., Any],
    arguments: Sequence[str] | None = None,
    *,
    name: str | None = None,
    outlives_readers: bool = False,
) -> None:
    """Run an application, called `name` on its help pages. If output cannot be written, continue if it
    `outlives_readers`, otherwise exit quietly with the reader, as in `| head`."""
    make_output_safe(outlives_readers)
    try:
        with path_errors_reported(), memory_errors_reported():
            try:
                app(list(arguments) if arguments is not None else None, prog_name=name)
            finally:
                sys.stdout.flush()  # report a full disk here instead of at Python's shutdown
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        leave(1)
    except CptError as problem:
        if not is_main_process() and not isinstance(problem, Interrupted):
            # The main process probably prints the same; then the launcher ends this process while it waits.
            time.sleep(SECONDS_FOR_THE_MAIN_PROCESS)
        # All processes receive the signal; only the supervisor reports it, after the launcher's last line.
        if not isinstance(problem, Interrupted) or (
            is_main_process() and SUPERVISED not in os.environ
        ):
            process = "" if is_main_process() else f"process {rank()}: "
            sys.stderr.write(f"{process}{type(problem).__name__}: {problem}\n")
        leave(problem.exit_code)
    except Exception:
        if not has_process_group():
            raise
        # skip Python's shutdown, which may hang: the others wait for this process
        traceback.print_exc()
        leave(1)


def hide_transformers_bars() -> None:
    """Without the bars per file read or written; a run has its own."""
    from transformers.utils.logging import (
        disable_progress_bar,  # imports torch, which takes seconds
    )

    disable_progress_bar()


@contextmanager
def path_errors_reported() -> Iterator[None]:
    """Convert the system's errors for wrong paths, read-only folders and full disks to a `ResourceError`."""
    try:
        yield
    except OSError as problem:
        is_known = problem.errno in (*ERRORS_OF_TYPOS, *ERRORS_OF_WRITING)
        has_path = problem.filename is not None or problem.errno == errno.ENOSPC
        if not (is_known and has_path):
            raise
        path = problem.filename or "a file or the output"
        raise ResourceError(
            f"{path}: {problem.strerror}. Use another path, change its permissions, or free space."
        ) from problem


@contextmanager
def memory_errors_reported() -> Iterator[None]:
    """Convert the errors of a limit such as `ulimit -v`, also while modules are imported, to a `ResourceError`."""
    try:
        yield
    except Exception as problem:
        # A save wraps the error; other errors of cpt have their own remedy.
        cause = problem.__cause__ if isinstance(problem, CheckpointError) else problem
        if not is_out_of_host_memory(cause):
            raise
        sys.unraisablehook = lambda _: None  # libraries' exit functions would report the same
        reason = " ".join(str(cause).split())[:200]
        if reason:
            reason = f" ({reason})"
        raise ResourceError(
            f"out of host memory{reason}. Free some, or raise the limits: `ulimit -v` (memory) and `ulimit -u`"
            " (processes and threads) show them."
        ) from problem


def is_out_of_host_memory(problem: BaseException | None) -> bool:
    if isinstance(problem, MemoryError):
        return True
    if isinstance(problem, SystemError):  # of C code that could not allocate its error
        return resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
    is_usual = isinstance(problem, ImportError | OSError | RuntimeError)
    return is_usual and any(text in str(problem) for text in ERRORS_OF_MEMORY)


def print_json(content: object) -> None:
    typer.echo(json.dumps(content, indent=2, ensure_ascii=False))


def refuse_ignored(options: Mapping[str, bool], because: str) -> None:
    """Refuse options without effect; `because` ends the sentence "--steps: no effect ..."."""
    names = [name for name, is_given in options.items() if is_given]
    if names:
        raise RecipeError(f"{' and '.join(names)}: no effect {because}. Remove it.")


def show_log(*, stderr: bool = False) -> None:
    """Print cpt's log: everything from the main process, warnings from the others."""
    messages: deque[str] = deque(maxlen=200)

    def is_news(record: logging.LogRecord) -> bool:
        """Show information once: checks, training and verdict open the same sources and log the same."""
        message = record.getMessage()
        is_repeated = record.levelno <= logging.INFO and message in messages
        if not is_repeated:
            messages.append(message)
        return not is_repeated

    handler = logging.StreamHandler(sys.stderr if stderr else sys.stdout)
    handler.setFormatter(logging.Formatter("%(message)s"))
    handler.addFilter(is_news)
    logger = logging.getLogger("cpt")
    logger.handlers = [handler]
    logger.propagate = False
    logger.setLevel(logging.INFO if is_main_process() else logging.WARNING)


# --- output errors that must not end a command ---


class LossyFile(FileIO):
    """A file descriptor whose write errors are ignored: its reader is gone, or its disk is full."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


def make_output_safe(outlives_readers: bool = False) -> None:
    """Replace characters that the terminal's encoding lacks, accept closed outputs, and ignore write errors: of stdout
    if the command `outlives_readers`, of stderr always, since they could not be reported."""
    # Otherwise the next socket, here or in a child, would get the closed descriptor, and receive the output.
    for number in (1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)
            os.set_inheritable(number, True)
    if not (sys.stdout and sys.stderr):  # `>&-`: the stream is None
        null = open(os.devnull, "w")  # noqa: SIM115 - until the process ends
        sys.stdout = sys.stdout or null
        sys.stderr = sys.stderr or null
    sys.stderr = reopened(sys.stderr, "backslashreplace", is_lossy=True)
    sys.stdout = reopened(sys.stdout, "replace", is_lossy=outlives_readers)


def reopened(stream: Any, errors: str, *, is_lossy: bool) -> Any:
    """Reopen a stream with other handling of encoding and write errors."""
    if not isinstance(stream, TextIOWrapper):
        return stream
    stream.reconfigure(errors=errors)
    raw = getattr(stream.buffer, "raw", stream.buffer)
    if not is_lossy or type(raw) is not FileIO:
        return stream
    lossy = BufferedWriter(LossyFile(raw.fileno(), "w", closefd=False))
    with suppress(OSError):
        stream.flush()
    return TextIOWrapper(lossy, stream.encoding, errors, line_buffering=True)
