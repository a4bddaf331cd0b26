"""Start a run once more, in a folder beside it: its recipe, what was chosen for it, its processes and variables."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cpt.errors import CptError, LaunchError, ResourceError, TrainingError
from cpt.hardware import count_cpu_cores
from cpt.launchers.attempts import SUPERVISED, command_of_attempt, kill_family
from cpt.launchers.processes import environment_alone
from cpt.recipe.load import dump_recipe, load_recipe
from cpt.recipe.schema import Recipe
from cpt.reproduce.record import Record
from cpt.runs.environment import deciding_variables
from cpt.runs.folder import RECIPE
from cpt.runs.record import Run

PROGRAM = Path(__file__).with_name("program.py")
SUFFIX, TAG = "-reproduced", "reproduces "
THREADS = "OMP_NUM_THREADS"
OF_A_MACHINE = "CUDA_VISIBLE_DEVICES"  # whose numbers mean nothing on another one


def repetition_of(record: Record) -> Recipe:
    """The recipe to run: the run's own, with the values that were chosen where it said `auto`; told to nobody,
    archived nowhere."""
    recipe = record.recipe
    chosen: Mapping[str, Any] = record.inputs.get("training", {})
    training = {key: chosen.get(key, value) if value == "auto" else value for key, value in recipe.training.items()}
    if chosen.get("deepspeed"):  # its content: the file may have changed, or accelerate's own config have named it
        training["deepspeed"] = chosen["deepspeed"]
    model, dtype = recipe.model, record.inputs.get("weights", {}).get("dtype")
    if (
        model.dtype == "auto"
        and model.lora is None
        and dtype is not None
        and not (training.get("deepspeed") or training.get("fsdp"))
    ):
        model = model.model_copy(update={"dtype": dtype})
    if record.environment.get("hardware", {}).get("gpus") == []:
        training["use_cpu"] = True
    return recipe.model_copy(
        update={
            "name": f"{record.folder.resolve().name}{SUFFIX}",
            "output_dir": record.folder.resolve().parent,
            "tags": [*recipe.tags, f"{TAG}{record.folder.resolve().name}"],
            "monitoring": type(recipe.monitoring)(),
            "checkpoints": recipe.checkpoints.model_copy(
                update={"archive": None, "weights_every_steps": None, "average": None}
            ),
            "training": training,
            "model": model,
        }
    )


def folder_for(recipe: Recipe) -> Path:
    """The repetition's folder, empty; an earlier repetition gives way.

    Raises:
        ResourceError: something else lies there.
    """
    folder = recipe.output_dir / recipe.name
    if not folder.exists():
        return folder
    try:
        is_ours = recipe.tags[-1] in load_recipe(folder / RECIPE).tags
    except CptError:
        is_ours = False
    if not is_ours:
        raise ResourceError(f"{folder} is in the way, and no repetition of this run. Move it, then again.")
    shutil.rmtree(folder)
    return folder


def run_again(
    record: Record, recipe: Recipe, *, steps: int | None, processes: int, launcher: str | None, quiet: bool = False
) -> Run:
    """Run it to its end, or to the log of a step.

    Args:
        quiet: what it prints goes to stderr.

    Raises:
        LaunchError: the launcher cannot be started.
        TrainingError: the repetition failed.
    """
    folder = folder_for(recipe)
    file = folder.with_name(f".{folder.name}.yaml")
    file.write_text(dump_recipe(recipe), encoding="utf-8")
    words = command_of_attempt([str(file), *(["--steps", str(steps)] if steps else [])], processes, launcher, PROGRAM)
    try:
        code = waited_for(words, record, quiet=quiet)
    finally:
        file.unlink(missing_ok=True)
    run = Run(folder)
    if code != 0:
        status = run.status()
        why = f"{status['error']}: {status['message']}" if "error" in status else f"exit code {code}"
        raise TrainingError(f"the repetition failed ({why}). What it left is in {folder}.")
    return run


def waited_for(words: Sequence[str], record: Record, *, quiet: bool) -> int:
    """The exit code of the command; whoever ends this process ends it too.

    Raises:
        LaunchError: it cannot be started.
    """
    before = {number: signal.signal(number, signal.default_int_handler) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        child = subprocess.Popen(
            words,
            cwd=record.place,
            env=environment_of(record),
            start_new_session=True,
            stdout=sys.stderr if quiet else None,
        )
        try:
            return child.wait()
        finally:
            if child.returncode is None:
                kill_family(child.pid)
                child.wait()
    except OSError as problem:
        raise LaunchError(f"--launcher: {words[0]} cannot be started: {problem.strerror}") from problem
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def environment_of(record: Record) -> dict[str, str]:
    """This environment, with the variables that decide figures as they were."""
    then: Mapping[str, str] = record.environment.get("variables", {})
    now = deciding_variables() if "variables" in record.environment else {}
    kept = {name: value for name, value in os.environ.items() if name not in now or name == OF_A_MACHINE}
    wanted = {name: value for name, value in then.items() if name != OF_A_MACHINE}
    cores = record.environment.get("hardware", {}).get("cores")
    if cores is not None and cores != count_cpu_cores() and record.processes == 1:
        wanted.setdefault(THREADS, str(cores))  # which torch takes from the cores, and which decide the order of sums
    # Python would look for modules first in the program's folder, whose files could hide others.
    marks = {SUPERVISED: str(os.getpid()), "PYTHONSAFEPATH": "1"}
    return {**kept, **wanted, **marks, "PYTHONPATH": environment_alone()["PYTHONPATH"]}
