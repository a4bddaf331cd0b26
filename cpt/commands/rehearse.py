"""`cpt rehearse RECIPE`: check, train a few steps, evaluate, save, export and resume, and report failures."""

import json
import math
import re
import shlex
import shutil
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal, cast

import typer

from cpt import errors
from cpt.cache import size_of
from cpt.checkpoints.manifest import read_manifest, verify_path
from cpt.checkpoints.resume import published_checkpoints
from cpt.command_line import AsJson, Launcher, Lora, Overrides, Processes, RecipePath
from cpt.distributed import environment_alone
from cpt.errors import (
    CheckpointError,
    CptError,
    LaunchError,
    RehearsalError,
    ResourceError,
    TrainingError,
)
from cpt.files import locked
from cpt.formatting import format_bytes, open_console, while_working
from cpt.hardware import host_memory_gib
from cpt.interrupts import end_like_ctrl_c
from cpt.launch.supervise import (
    command_of_attempt,
    refuse_launcher,
    refuse_more_than_the_machine_holds,
)
from cpt.plugins import import_user_module
from cpt.process import Child
from cpt.recipe.load import dump_recipe, load_with_tree
from cpt.recipe.schema import Checkpoints, Component, Recipe
from cpt.recipe.tree import Node
from cpt.runs.folder import read_objects
from cpt.runs.record import EXPORT, LOCK, Run

PROGRAM = Path(__file__).with_name("rehearse_program.py")
NAME = "run"
KILLED = re.compile(r"Signal 9 \(SIGKILL\)|return code = -9|SIGKILL: 9")
"""Lines of torchrun, deepspeed and accelerate."""
ROUNDING = 1e-3  # relative differences of losses
ROUNDING_IN_16_BITS = 2e-2
NOT_REHEARSED = ("logging_first_step", "logging_strategy")
DECISIVE = ("recipe", "longest rows", "first steps")
"""Later steps are not tried if one of these failed."""


class SkippedPart(Exception):  # noqa: N818
    """A step cannot be tried; the message is the reason."""


@dataclass(frozen=True)
class RehearsedPart:
    """One row: the measurement, or the class and text of the error."""

    step: str
    verdict: Literal["ok", "FAILED", "not run"]
    result: str
    error: str | None = None


@dataclass
class Rehearsal:
    recipe: Recipe
    root: Node | None
    processes: int
    launcher: str | None
    scratch: Path
    """An empty folder on the run's disk."""
    losses: dict[int, float] = field(default_factory=dict)
    """Losses of the first steps, by step."""
    failure: CptError | None = None
    """The error that ended the first steps early."""
    measured: str = ""

    def __post_init__(self) -> None:
        self.run = self.scratch / NAME
        recipe = self.recipe
        checkpoints = {
            "every_tokens": None,
            "every_steps": None,
            "weights_every_steps": None,
            "archive": None,
            "average": None,
            "keep": Checkpoints().keep,
        }
        evaluation = {
            "every_tokens": None,
            "every_steps": None,
            "tasks": [],
            "tasks_every_tokens": None,
            "tasks_device": "auto",
            "prompts": recipe.evaluation.prompts[:1],
            "retain": dict.fromkeys(recipe.evaluation.retain),
            "stop": None,
        }
        training = {}
        for key, value in recipe.training.items():
            if key not in NOT_REHEARSED:
                training[key] = value
        changes = {
            "name": NAME,
            "output_dir": self.scratch,
            "checkpoints": recipe.checkpoints.model_copy(update=checkpoints),
            "evaluation": recipe.evaluation.model_copy(update=evaluation),
            "monitoring": recipe.monitoring.model_copy(update={"trackers": []}),
            "safety": recipe.safety.model_copy(update={"on_oom": Component(name="abort")}),
            "training": {**training, "logging_steps": 1},
        }
        # model, data, batch, budget and schedule of the run; the rehearsal saves and evaluates
        self.rehearsed = recipe.model_copy(update=changes)

    def rehearse(self, *, shows: bool) -> list[RehearsedPart]:
        """Try each step, and print its result if `shows`."""
        steps: dict[str, Callable[[], str]] = {
            "recipe": self.check_recipe,
            "longest rows": self.train_longest_rows,
            "first steps": self.train_first_steps,
            "save": self.check_saved,
            "export": self.check_exported,
            "disk": self.check_disk,
            "resume": self.resume,
        }
        failed = ""
        findings: list[RehearsedPart] = []
        for step, check in steps.items():
            try:
                if failed:
                    raise SkippedPart(f"{failed} failed")
                with while_working(open_console(stderr=True).status(f"{step} ...")):
                    finding = RehearsedPart(step, "ok", check())
            except SkippedPart as reason:
                finding = RehearsedPart(step, "not run", str(reason))
            except CptError as problem:
                if step in DECISIVE:
                    failed = step
                finding = RehearsedPart(step, "FAILED", str(problem), type(problem).__name__)
            findings.append(finding)
            if shows:
                text = finding.result
                if finding.error:
                    text = f"{finding.error}: {text}"
                indented = textwrap.indent(text, " " * 21).lstrip()
                typer.echo(f"{step:<13}{finding.verdict:<8}{indented}")
        return findings

    def check_recipe(self) -> str:
        from cpt.planning.gate import refuse_mistakes

        warnings = refuse_mistakes(self.rehearsed, root=self.root).warnings
        if warnings:
            return f"no mistakes, {len(warnings)} warning(s), see cpt check"
        return "no mistakes"

    def train_longest_rows(self) -> str:
        problem = self.start("longest_rows")
        if problem is not None:
            raise problem
        shutil.rmtree(self.run)
        return f"rows of {self.recipe.data.sequence_length:,} tokens; {self.measured}"

    def train_first_steps(self) -> str:
        self.failure = self.start("first_steps")
        self.losses = losses_of(self.run)
        if not self.losses:
            raise self.failure or TrainingError("the run has no steps.")
        losses = ", ".join(f"{loss:.4f}" for loss in self.losses.values())
        if not all(map(math.isfinite, self.losses.values())):
            raise TrainingError(
                f"loss {losses}. Lower `optimizer.learning_rate`, or check the data."
            )
        return f"loss {losses}; {self.measured}"

    def check_saved(self) -> str:
        """Read every file of the checkpoint back; errors of the preceding evaluation are raised here too."""
        checkpoint = next(iter(published_checkpoints(self.run)), None)
        if checkpoint is None:
            events = read_objects(self.run / "events.jsonl")
            failures = []
            for event in events:
                if event["kind"] == "save_failed":
                    failures.append(event["message"])
            if failures:
                raise ResourceError(
                    f"{failures[-1]} Free some space, or set `output_dir` to another disk."
                )
            raise self.failure or CheckpointError("no checkpoint was saved.")
        damaged = []
        for verified in verify_path(checkpoint):
            damaged += [f"{verified.folder.name}/{damage}" for damage in verified.found]
        if damaged:
            raise CheckpointError(f"{'; '.join(damaged[:3])}. Set `output_dir` to another disk.")
        return f"{format_bytes(size_of(checkpoint))}; all files are intact"

    def check_exported(self) -> str:
        """Load the exported model with plain transformers, in a process without cpt."""
        import torch
        from transformers import AutoConfig, AutoTokenizer

        from cpt.export.proof import logits_in_another_process, proof_text

        export = self.run / EXPORT
        if not (export / "config.json").exists():
            raise self.failure or SkippedPart("no model was exported")
        if self.recipe.model.trust_remote_code:
            return f"{format_bytes(size_of(export))}; not loaded here, because it needs custom code"
        if self.recipe.model.import_ is not None:
            import_user_module(self.recipe.model.import_)
        try:
            config = AutoConfig.from_pretrained(export)
            dtype = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
            text = proof_text(AutoTokenizer.from_pretrained(export), config)
            logits = logits_in_another_process(export, text, dtype)
        except (ValueError, OSError) as problem:
            raise CheckpointError(str(problem)) from problem
        if not logits.isfinite().all():
            raise CheckpointError("the logits of the exported model are not finite.")
        return (
            f"{format_bytes(size_of(export))}; plain transformers loads it, its logits are finite"
        )

    def resume(self) -> str:
        """Continue from the checkpoint in new processes; losses must be bit-equal, or equal up to rounding."""
        from cpt.training.contents import BIT_EXACT

        saved = published_checkpoints(self.run)
        if not saved:
            raise SkippedPart("nothing was saved")
        checkpoint, *later = saved
        for folder in later:  # a short run may have saved at its end
            shutil.rmtree(folder)
        shutil.rmtree(self.run / EXPORT, ignore_errors=True)  # otherwise the run counts as finished
        problem = self.start("resumed")
        if not checkpoint.exists():  # the run refused it and continued from an older state
            reasons = [file.read_text().strip() for file in self.run.glob("bad-*/reason.txt")]
            raise CheckpointError(f"{checkpoint.name} was refused: {'; '.join(reasons)}")
        manifest = read_manifest(checkpoint)
        resumed = losses_of(self.run)
        steps = [step for step in self.losses if step > manifest.step]
        if problem is not None and (self.failure is None or max(resumed) <= manifest.step):
            raise problem
        title = f"steps {', '.join(map(str, steps))} in new processes"
        if all(resumed[step].hex() == self.losses[step].hex() for step in steps):
            return f"{title}: bit-equal losses"
        difference = max(abs(resumed[step] / self.losses[step] - 1) for step in steps)
        in_16_bits = self.recipe.training.get("bf16") or self.recipe.training.get("fp16")
        allowed = ROUNDING_IN_16_BITS if in_16_bits else ROUNDING
        if manifest.exactness == BIT_EXACT or not difference <= allowed:  # NaN is not
            raise CheckpointError(
                f"{title}: losses differ by {difference:.1e}. State that affects the next step is not in the"
                " checkpoint: give that object a state_dict."
            )
        return f"{title}: losses differ by {difference:.1e}, as expected for this run ({manifest.exactness})"

    def check_disk(self) -> str:
        """Compare the disk space needed by the whole run, from measured sizes, with the free space."""
        from cpt.planning.check_resources import DiskNeeds, check_disk, checkpoints_at_once

        checkpoint = next(iter(published_checkpoints(self.run)), None)
        if checkpoint is None:
            raise SkippedPart("no checkpoint or export to measure")
        needs = DiskNeeds(
            size_of(checkpoint), size_of(self.run / EXPORT), checkpoints_at_once(self.recipe)
        )
        check_disk(self.recipe, needs, freed=size_of(self.scratch))
        parts = f"{needs.checkpoints_at_once} x {format_bytes(needs.checkpoint)} of checkpoints"
        return f"{parts} + {format_bytes(needs.export)} of {EXPORT} = {format_bytes(needs.total)}, which fits"

    def start(self, part: str) -> CptError | None:
        """Run a part to its end, and describe its processes' measurements (the maximum over processes)."""
        file = self.scratch / "recipe.yaml"
        log = self.scratch / f"{part}.log"
        reports = self.scratch / part
        file.write_text(dump_recipe(self.rehearsed))
        reports.mkdir()
        command = command_of_attempt(
            [part, str(file), str(reports)], self.processes, self.launcher, PROGRAM
        )
        # Without PYTHONSAFEPATH, Python would import modules from the program's folder first.
        environment = {"PYTHONSAFEPATH": "1", "PYTHONPATH": environment_alone()["PYTHONPATH"]}
        with log.open("wb") as output:
            child = Child(command, environment=environment, output=output)
            try:
                exit_code = child.wait()
            finally:
                child.kill_family()
        measurements = [json.loads(path.read_text()) for path in reports.iterdir()]
        if measurements:
            self.measured = format_measurements(measurements)
        return None if exit_code == 0 else error_of_part(self.run, exit_code, log)


def format_measurements(measurements: Sequence[Mapping[str, float]]) -> str:
    """The maximum over processes of each measurement."""
    maxima = {key: max(of_process[key] for of_process in measurements) for key in measurements[0]}
    parts = [f"host {format_bytes(maxima['host'])} per process, of {host_memory_gib():,.1f} GiB"]
    if "gpu" in maxima:
        parts.insert(0, f"GPU {format_bytes(maxima['gpu'])} of {format_bytes(maxima['gpu_total'])}")
    return f"{maxima['seconds']:.2f} s per step; {', '.join(parts)}"


def error_of_part(run: Path, exit_code: int, log: Path) -> CptError:
    """Why the processes ended, from the run's status and their log."""
    status = Run(run).status()
    text = log.read_text(errors="replace")
    if exit_code in (-9, 137) or KILLED.search(text):
        return ResourceError(
            "a process was killed (SIGKILL), most likely because the host ran out of memory. Set"
            " `training.per_device_train_batch_size` lower, `checkpoints.in_background: false`, or offload less."
            f" The log is {log}."
        )
    if status.get("state") not in ("failed", "interrupted"):
        last_lines = "".join(text.splitlines(keepends=True)[-5:]).strip()
        return LaunchError(
            f"the processes ended with code {exit_code}:\n{last_lines}\nThe log is {log}."
        )
    error = status["error"]
    message = str(status["message"])
    kind = getattr(errors, error, None)
    if kind is not None:
        return cast(CptError, kind(message))
    if "OutOfMemory" in error or "out of memory" in message.lower():
        remedy = "Set `gradient_checkpointing: true` or smaller batches; `cpt plan` proposes a fit"
        return ResourceError(f"out of memory: {message.splitlines()[0][:400]} {remedy}.")
    return TrainingError(f"{error}: {message[:400]}. The traceback is in {log}.")


def losses_of(run: Path) -> dict[int, float]:
    losses = {}
    for row in read_objects(run / "metrics.jsonl"):
        if "loss" in row:
            losses[row["step"]] = row["loss"]
    return losses


@contextmanager
def scratch_folder(recipe: Recipe) -> Iterator[Path]:
    """An empty folder next to the run's, locked for one rehearsal at a time."""
    folder = recipe.output_dir / f".{recipe.name}.rehearsal"
    from cpt.planning.gate import probe

    probe("output_dir", folder)
    folder.mkdir(parents=True, exist_ok=True)
    with locked(
        folder / LOCK, f"another rehearsal of this recipe is running in {folder}. Wait for it."
    ):
        for path in folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != LOCK:
                path.unlink()
        yield folder


def command(
    recipe: RecipePath,
    overrides: Overrides = None,
    lora: Lora = False,
    processes: Processes = 1,
    launcher: Launcher = None,
    as_json: AsJson = False,
) -> None:
    """Rehearse a run: longest rows, first steps, evaluation, save, export, resume, disk. Exit code 2 on failure.

    It uses a folder next to the run's, on the same disk, and removes it at the end unless a step failed.

    Example: cpt rehearse recipe.yaml --processes 2
    """
    refuse_launcher("rehearse", sets_processes=processes > 1, launcher=launcher)
    loaded, root = load_with_tree(recipe, overrides or (), lora=lora)
    if launcher is None:
        refuse_more_than_the_machine_holds(processes, on_gpus=not loaded.training.get("use_cpu"))
    end_like_ctrl_c()
    with scratch_folder(loaded) as scratch:
        failed: list[str] = []
        try:
            findings = Rehearsal(loaded, root, processes, launcher, scratch).rehearse(
                shows=not as_json
            )
            failed = [finding.step for finding in findings if finding.verdict == "FAILED"]
        except KeyboardInterrupt as problem:
            typer.echo(
                "Interrupted. The processes have ended, and the rehearsal's folder was removed.",
                err=True,
            )
            raise typer.Exit(130) from problem
        finally:
            if not failed:
                shutil.rmtree(scratch, ignore_errors=True)
                with suppress(OSError):  # not empty: it has other runs
                    scratch.parent.rmdir()
    if as_json:
        rows = list(map(asdict, findings))
        folder = str(scratch) if failed else None
        typer.echo(json.dumps({"passed": not failed, "folder": folder, "findings": rows}, indent=1))
    if failed:
        raise RehearsalError(
            f"the run would fail: {', '.join(failed)}. The rehearsal's folder is {scratch}; the next rehearsal"
            " replaces it."
        )
    if not as_json:
        start = ["cpt", "train", str(recipe), *(overrides or ())]
        if lora:
            start.append("--lora")
        if launcher is not None:
            start += ["--supervise", "--launcher", launcher]
        elif processes > 1:
            start += ["--supervise", "--processes", str(processes)]
        typer.echo(f"Every step succeeded. Start the run: {shlex.join(start)}")
