"""The order of a rehearsal: what comes after what, and what is left out when something before it failed."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from cpt.checkpoints.resume import published_checkpoints
from cpt.checkpoints.rotation import find_rule
from cpt.data.store.folder import size_of
from cpt.errors import CheckpointError, LaunchError, RecipeError
from cpt.preflight.gate import check_reality
from cpt.preflight.places import placed
from cpt.recipe.load import dump_recipe
from cpt.recipe.schema import Recipe
from cpt.recipe.tree import Node
from cpt.rehearsal import judging
from cpt.rehearsal.archive import judge_archive
from cpt.rehearsal.disk import Sizes, judge_disk
from cpt.rehearsal.recipes import STEP_OF_WEIGHTS, rehearsed
from cpt.rehearsal.starting import Ended, Launch, run_part
from cpt.rehearsal.table import Finding, bad, good, not_run
from cpt.rehearsal.watching import LENGTH
from cpt.runs.record import EXPORT, hold
from cpt.safety.restart import LEARNED
from cpt.stages.length import RunLength

LONGEST_ROWS, FIRST_STEPS = "longest-rows", "first-steps"  # names of the rehearsed runs
THE_REST = "the rest"


@dataclass
class Rehearsal:
    """One recipe, tried.

    Args:
        root: the recipe's tree, so that mistakes are shown with their lines.
        scratch: an empty folder on the disk where the run will be.
        tell: given each row when it is known.
        begin: told what comes next.
    """

    recipe: Recipe
    root: Node | None
    launch: Launch
    scratch: Path
    tell: Callable[[Finding], None] = lambda finding: None
    begin: Callable[[str], None] = lambda what: None
    findings: list[Finding] = field(default_factory=list)

    def rehearse(self) -> list[Finding]:
        """Everything, in the order in which a run does it."""
        self.begin("reading the recipe")
        self.found(self.judge_recipe())
        if self.has_failed("recipe"):
            self.leave_out(THE_REST, why="the recipe has mistakes")
            return self.findings
        if self.recipe.checkpoints.archive is not None:
            self.begin("the archive")
            self.found(judge_archive(self.recipe.checkpoints.archive))
        self.try_longest_rows()
        return self.findings

    # --- the parts ---------------------------------------------------------------------------------------------------

    def judge_recipe(self) -> Finding:
        """What `cpt check` says; disk and archive have rows of their own."""
        report = check_reality(rehearsed(self.recipe, self.scratch, FIRST_STEPS))
        if self.recipe.checkpoints.kept is not None:
            kept = self.recipe.checkpoints.kept
            report.run(lambda: find_rule(kept))
        mistakes = [*report.mistakes, *report.blockers]
        if mistakes:
            kinds = {type(mistake).__name__ for mistake in mistakes}
            text = "\n".join(placed(str(mistake), self.root) for mistake in mistakes)
            return bad("recipe", text, kinds.pop() if len(kinds) == 1 else RecipeError.__name__)
        warnings = len(report.warnings)
        return good("recipe", "no mistakes" + (f", {warnings} warning(s): cpt check tells them" if warnings else ""))

    def try_longest_rows(self) -> None:
        """Memory first: it is what most runs fail of."""
        self.begin("longest rows")
        run = self.scratch / LONGEST_ROWS
        ended = self.run("longest_rows", LONGEST_ROWS, on_oom="split_batch")
        finding = judging.judge_longest_rows(ended, run, self.recipe)
        self.found(finding)
        if finding.step != "longest rows":  # it did not even come to its first row
            self.leave_out(THE_REST, why="the run did not come to its first row")
            return
        learned = (run / LEARNED).read_text() if (run / LEARNED).exists() else None
        shutil.rmtree(run, ignore_errors=True)
        self.try_first_steps(learned)

    def try_first_steps(self, learned: str | None) -> None:
        """The run as it begins, is saved, resumed, and ends.

        Args:
            learned: which micro-batch fits, where the recipe's does not: that is good enough to try the rest.
        """
        self.begin("first steps, evaluation and save")
        run = self.empty_run(learned)
        ended = self.run("first_steps", FIRST_STEPS)
        evaluation = judging.judge_evaluation(ended, self.recipe)
        if evaluation.verdict == "FAILED" and not ended.is_done:
            self.begin("first steps and save, without evaluation")
            run = self.empty_run(learned)
            ended = self.run("first_steps_unjudged", FIRST_STEPS)
        checkpoint = next(iter(published_checkpoints(run)), None)
        self.found(judging.judge_first_steps(ended, run))
        self.found(evaluation)
        self.found(judging.judge_save(ended, run, checkpoint))
        weights, export = run / f"weights-{STEP_OF_WEIGHTS}", run / EXPORT
        if checkpoint is None:
            self.leave_out("verify", why="nothing was saved")
        else:
            self.found(judging.judge_files([checkpoint, *(folder for folder in (weights, export) if folder.exists())]))
        self.begin("export")
        self.found(judging.judge_export(ended, export, self.recipe))
        if not ended.is_done and not any(
            self.has_failed(step) for step in ("first steps", "evaluation", "save", "export")
        ):
            self.found(judging.failed("end", ended))  # of something that has no row of its own
        sizes = Sizes(size_of(checkpoint) if checkpoint else 0, size_of(weights) or size_of(export), size_of(export))
        if checkpoint is None:
            self.leave_out("resume", why="nothing was saved")
        else:
            self.try_to_resume(run, checkpoint)
        self.try_tasks(run)
        self.judge_disk(ended, sizes)

    def try_to_resume(self, run: Path, checkpoint: Path) -> None:
        """In new processes, from the checkpoint, to the step where the others ended."""
        self.begin("resume")
        export, straight = run / EXPORT, run / f"{EXPORT}-uninterrupted"
        before = judging.losses(run)
        for later in published_checkpoints(run)[1:]:  # of a run so short that its end was reached
            shutil.rmtree(later)
        if export.exists():
            export.rename(straight)
        ended = self.run("resumed", FIRST_STEPS)
        half = bool(self.recipe.training.get("bf16") or self.recipe.training.get("fp16"))
        if not checkpoint.exists():  # the run itself has put it aside
            reasons = [path.read_text().strip() for path in run.glob("bad-*/reason.txt")]
            self.found(bad("resume", CheckpointError(f"{checkpoint.name} was refused: {'; '.join(reasons)}")))
        else:
            self.found(judging.judge_resume(ended, before, run, checkpoint, (straight, export), half))
        if straight.exists() and not export.exists():
            straight.rename(export)

    def try_tasks(self, run: Path) -> None:
        """What follows the training, in one process."""
        if not self.recipe.evaluation.tasks:
            return
        if not (run / EXPORT / "config.json").exists():
            self.leave_out("tasks", why="there is no exported model")
            return
        self.begin("tasks")
        ended = run_part("tasks", self.scratch / f"{FIRST_STEPS}.yaml", run, self.scratch, Launch(1, None))
        self.found(judging.judge_tasks(ended, self.recipe))

    def judge_disk(self, ended: Ended, sizes: Sizes) -> None:
        """With what was measured."""
        length = ended.report(LENGTH)
        if not sizes.checkpoint or length is None:
            self.leave_out("disk", why="nothing was saved that could be measured")
            return
        run, section = self.recipe.output_dir / self.recipe.name, self.recipe.checkpoints
        if self.has_failed("archive"):
            section = section.model_copy(update={"archive": None})
        self.found(judge_disk(section, RunLength(**length), sizes, run, size_of(self.scratch)))

    # --- helpers -----------------------------------------------------------------------------------------------------

    def run(self, part: str, name: str, **safety: object) -> Ended:
        """Write the part's recipe, and start it."""
        path = self.scratch / f"{name}.yaml"
        path.write_text(dump_recipe(rehearsed(self.recipe, self.scratch, name, **safety)))
        return run_part(part, path, self.scratch / name, self.scratch, self.launch)

    def empty_run(self, learned: str | None) -> Path:
        """The folder of a run that has only learned something of memory."""
        run = self.scratch / FIRST_STEPS
        shutil.rmtree(run, ignore_errors=True)
        run.mkdir()
        if learned is not None:
            (run / LEARNED).write_text(learned)
        return run

    def found(self, finding: Finding) -> None:
        """One more row."""
        self.findings.append(finding)
        self.tell(finding)

    def leave_out(self, *steps: str, why: str) -> None:
        """Rows of what could not be tried."""
        for step in steps:
            self.found(not_run(step, why))

    def has_failed(self, step: str) -> bool:
        """Whether its row says so."""
        return any(finding.step == step and finding.verdict == "FAILED" for finding in self.findings)


@contextmanager
def scratch_folder(recipe: Recipe) -> Iterator[Path]:
    """An empty folder beside the run's, for one rehearsal at a time; what is to stay is not removed by it.

    Raises:
        LaunchError: the recipe is being rehearsed right now.
        RecipeError: it cannot be made.
    """
    folder = recipe.output_dir / f".{recipe.name}.rehearsal"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = only_rehearsal(folder)
        for path in folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif lock is None or path.name != Path(lock.name).name:
                path.unlink()
    except OSError as problem:
        text = (
            f"`output_dir`: nothing can be written in {recipe.output_dir}: {problem.strerror}. Set output_dir to a"
            " folder you can write."
        )
        raise RecipeError(text) from problem
    try:
        yield folder
    finally:
        if lock is not None:
            lock.close()


def only_rehearsal(folder: Path) -> IO[str] | None:
    """The folder's lock.

    Raises:
        LaunchError: somebody else has it.
    """
    try:
        return hold(folder)
    except LaunchError as problem:
        raise LaunchError(
            f"this recipe is being rehearsed already, in {folder}. Wait for that to end, or end it."
        ) from problem


def remove_scratch(folder: Path) -> None:
    """With the folder of runs, where the rehearsal made that."""
    shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):
        folder.parent.rmdir()
