"""Change the recipe of a started run: which keys may change, from which step on, and what the history records."""

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from cpt.checkpoints.manifest import (
    MANIFEST,
    POSITION,
    STATE,
    Manifest,
    defects,
    read_manifest,
)
from cpt.checkpoints.resume import ResumePoint, Wanted, published_checkpoints, refuse_damaged
from cpt.data.rows.stretches import ended_stretches, problems_of_change
from cpt.distributed import groups_of_rows, print_once, world_size
from cpt.errors import CheckpointError, RecipeError, RestartNeeded
from cpt.evaluation.paired import saved_losses
from cpt.formatting import bars
from cpt.optim.schedules import SCHEDULES, check_schedule, phases_in_tokens
from cpt.plugins import find
from cpt.recipe.keys import DEFAULT_MICRO_BATCH
from cpt.recipe.load import (
    UNSET,
    Change,
    changes_between,
    without_defaults,
)
from cpt.recipe.schema import Recipe
from cpt.runs.folder import (
    HELD_OUT,
    HISTORY,
    INPUTS,
    METRICS,
    RECIPE,
    SAMPLES,
    STATUS,
    Content,
    began_from,
    keep_lines_until,
    read_object,
)
from cpt.runs.history import (
    Part,
    RecipeRecord,
    part_after,
    read_record,
    recorded_inputs,
    write_record,
)
from cpt.runs.record import Run, has_results
from cpt.training.inputs import RunInputs

BATCH = (
    "budget.global_batch_tokens",
    "training.per_device_train_batch_size",
    "training.gradient_accumulation_steps",
)
WITH_A_STABLE_PART = ("wsd", "infinite")
JUMP = 0.01  # of the peak learning rate
PLOT_WIDTH = 60  # characters


@dataclass(frozen=True)
class Proposal:
    """An edited recipe for a run that has a recipe already."""

    folder: Path
    before: Recipe
    """The recipe that holds after `step`, without this change."""
    after: Recipe
    step: int
    lines: list[Content]
    """The history until now."""
    manifest: Manifest | None
    """That of the checkpoint to resume from."""
    source: Path
    """The run's folder, or that of the run it branches from."""
    drops_later: bool = False
    """Whether the run continues in another way than it did after this step."""

    @property
    def is_branch(self) -> bool:
        return self.source != self.folder

    @property
    def changes(self) -> list[Change]:
        keys_of_branch = ("name", "output_dir", "description", "tags")  # of a branch
        changes = []
        for change in changes_between(self.before, self.after):
            if not (self.is_branch and change.key in keys_of_branch):
                changes.append(change)
        return changes

    @property
    def from_this_step(self) -> list[Change]:
        """The changes that decide what is learned."""
        return [change for change in self.changes if not are_free([change])]

    @property
    def changes_data(self) -> bool:
        # The text of a new held-out set is dropped from sources that are added with it or later.
        is_of_data = any(
            change.key.startswith(("data.", "evaluation.perplexity"))
            for change in self.from_this_step
        )
        return (
            is_of_data
            or phases_in_tokens(self.before).phases != phases_in_tokens(self.after).phases
        )

    def check(self) -> None:
        """Raise RecipeError for keys that are fixed, and for changes that the run cannot follow."""
        fixed = [change for change in self.from_this_step if change.kind == "fixed"]
        if fixed:
            raise RecipeError(
                f"`{fixed[0].key}`: {self.source} is a run of another recipe. These keys are fixed once a run has"
                f" started (there -> here):\n{listed(fixed)}\nRestore them; or start another run: name=..., or --new;"
                f" from this run's weights: model.path={self.source}"
            )
        problems = [*self.problems_of_batch(), *self.problems_of_budget()]
        if self.changes_data:
            ended = part_after(self.lines, self.step, self.before).stretches
            read = [stretch.data for stretch in ended_stretches(ended)]
            if (
                not ended or ended[-1]["step"] < self.step
            ):  # otherwise the stretch until now is empty
                read.append(self.before.data)
            problems += problems_of_change(read, self.after.data)
        if problems:
            where = (
                f"`{self.changes[0].key}`: {self.folder} cannot be changed at step {self.step:,}"
            )
            raise RecipeError(f"{where}: {' '.join(problems)}")

    def problems_of_batch(self) -> Iterator[str]:
        if (
            self.manifest is None
            or not self.manifest.step
            or all(change.key not in BATCH for change in self.changes)
        ):
            return
        tokens_before = self.manifest.tokens // self.manifest.step
        after = self.after
        tokens_after = after.budget.global_batch_tokens
        length = after.data.sequence_length
        if tokens_after is None:
            rows = rows_at_once(after)
            readers = {world_size(), self.manifest.world_size}
            if self.before.budget.global_batch_tokens is None and rows == rows_at_once(self.before):
                return
            possible_tokens = []
            for number in readers:
                possible_tokens.append(rows * groups_of_rows(after.training, number) * length)
            tokens_after = tokens_before if tokens_before in possible_tokens else possible_tokens[0]
        if tokens_after != tokens_before:
            yield (
                f"a step would train {tokens_after:,} tokens instead of {tokens_before:,}. A run keeps its global"
                f" batch: change `{BATCH[1]}` and `{BATCH[2]}` together, or write `{BATCH[0]}: {tokens_before}`."
            )

    def problems_of_budget(self) -> Iterator[str]:
        trained = self.trained_tokens
        (old, new) = self.totals
        if old is None or new is None or not self.from_this_step:
            return
        if new <= trained:
            yield (
                f"the run has trained {trained:,} tokens already, and `budget` is {new:,.0f}. Set a larger budget, or"
                " resume from an earlier checkpoint: --resume CHECKPOINT."
            )
            return
        if not any(
            change.key.startswith(("budget.", "schedule.")) for change in self.from_this_step
        ):
            return
        section = self.after.schedule
        check_schedule(section.name, section.options, new)
        before = factor_at(self.before, trained, old)
        after = factor_at(self.after, trained, new)
        is_of_one_shape = (
            section.name in WITH_A_STABLE_PART and section.name == self.before.schedule.name
        )
        if is_of_one_shape and abs(after - before) > JUMP:
            yield (
                f"`schedule` {section.name}: its decay would begin or end in the past: the learning rate would jump"
                f" from {before:.3f} to {after:.3f} of its peak. Resume from a checkpoint of its constant part"
                " (--resume CHECKPOINT), or change the lengths of its parts."
            )

    @property
    def trained_tokens(self) -> int:
        if self.manifest is None:
            return 0
        return self.manifest.tokens

    @property
    def totals(self) -> tuple[float | None, float | None]:
        """Tokens of the whole run before and after the change; None if unknown."""
        old = self.before.budget
        new = self.after.budget
        steps = read_object(self.source / STATUS).get("steps")
        planned: float | None = old.tokens
        if (
            planned is None
            and isinstance(steps, int)
            and self.manifest is not None
            and self.manifest.step
        ):
            planned = steps * self.manifest.tokens / self.manifest.step
        if new.tokens is not None or planned is None or old.epochs is None or new.epochs is None:
            return planned, new.tokens
        return planned, planned * new.epochs / old.epochs

    def __str__(self) -> str:
        """The changes and their first step, with a plot of the learning rate if it changes."""
        where = f"{self.folder} changes from step {self.step + 1:,} on:"
        if self.is_branch:
            where = f"{self.folder} continues {self.source} from step {self.step:,}, with these changes:"
        dropped = []
        for line in self.lines:
            if line["step"] > self.step:
                dropped.append(line["step"])
        lines = [where, listed(self.from_this_step), *self.plot()]
        if dropped:
            steps = ", ".join(f"{step:,}" for step in dropped)
            lines.append(f"The changes that were made after step {steps} are dropped.")
        if any(change.key.startswith("evaluation.perplexity") for change in self.from_this_step):
            lines.append(
                "Sources that the run reads already keep documents of new held-out sets: take other texts."
            )
        return "\n".join(lines)

    def plot(self) -> Iterator[str]:
        (old, new) = self.totals
        keys = ("budget.", "schedule.", "optimizer.")
        if (
            old is None
            or new is None
            or not any(change.key.startswith(keys) for change in self.from_this_step)
        ):
            return
        longest = max(old, new)
        before = learning_rates(self.before, old, longest)
        after = learning_rates(self.after, new, longest)
        highest = max(rate for rate in [*before, *after] if rate is not None)
        yield f"Learning rate, 0 to {highest:.3g}, over {longest:,.0f} tokens:"
        yield f"  before {bars(before, highest)}"
        yield f"  after  {bars(after, highest)}"
        column_now = min(PLOT_WIDTH - 1, int(PLOT_WIDTH * self.trained_tokens / longest))
        yield f"         {' ' * column_now}^ step {self.step:,}"


def learning_rates(recipe: Recipe, total: float, longest: float) -> list[float | None]:
    """One learning rate for each column of a plot over `longest` tokens; None after the run's last token."""
    rates: list[float | None] = []
    for column in range(PLOT_WIDTH):
        tokens = longest * (column + 0.5) / PLOT_WIDTH
        if tokens <= total:
            rates.append(recipe.optimizer.learning_rate * factor_at(recipe, tokens, total))
        else:
            rates.append(None)
    return rates


def rows_at_once(recipe: Recipe) -> int:
    """Rows of a step for each process or group of processes."""
    training = recipe.training
    rows = training.get("per_device_train_batch_size", DEFAULT_MICRO_BATCH)
    return int(rows) * int(training.get("gradient_accumulation_steps", 1))


def factor_at(recipe: Recipe, tokens: float, total: float) -> float:
    schedule = recipe.schedule
    return float(find("schedule", schedule.name, SCHEDULES)(tokens, total, **schedule.options))


def listed(changes: Sequence[Change]) -> str:
    return "\n".join(f"  {change}" for change in changes)


def propose(
    recipe: Recipe,
    folder: Path,
    checkpoint: Path | None,
    *,
    is_branch: bool = False,
    goes_back: bool = False,
) -> Proposal | None:
    """Compare the recipe with that of its run, or of the run that it branches from, at an intact checkpoint.

    None if there is no other recipe, or no difference. If the run `goes_back` to this checkpoint, later changes do not
    count.
    """
    source = checkpoint.parent if is_branch and checkpoint is not None else folder
    record = read_record(source)
    if record is None:
        return None
    differences = changes_between(record.recipe, recipe)
    if not is_branch and not goes_back and not differences:
        return None
    step = steps_in(checkpoint)
    lines = record.history
    has_later = any(line["step"] > step for line in lines)
    before = part_after(lines, step, record.recipe).recipe
    after = recipe
    # The steps until a later change are repeated as they were, if only free keys differ.
    repeats = not is_branch and not goes_back and has_later and are_free(differences)
    if repeats:
        after = part_after(lines, step, recipe).recipe
    is_other = is_branch or has_later and not repeats
    proposal = Proposal(
        folder=folder,
        before=before,
        after=after,
        step=step,
        lines=lines,
        manifest=None if checkpoint is None else manifest_of(checkpoint),
        source=source,
        drops_later=is_other,
    )
    if proposal.changes or is_other:
        return proposal
    return None


def are_free(changes: Sequence[Change]) -> bool:
    """Whether they change no step."""
    return all(change.kind == "free" or change.key in BATCH for change in changes)


def manifest_of(checkpoint: Path) -> Manifest | None:
    """None for a checkpoint from another program."""
    if (checkpoint / MANIFEST).exists():
        return read_manifest(checkpoint)
    return None


def newest_usable(folder: Path) -> Path | None:
    """The checkpoint that `choose_checkpoint` will take, but nothing is renamed before a change is accepted."""
    for checkpoint in reversed(published_checkpoints(folder)):
        if not defects(checkpoint):
            return checkpoint
    return began_from(folder)


def steps_in(checkpoint: Path | None) -> int:
    if checkpoint is None:
        return 0
    return int(read_object(checkpoint / STATE).get("global_step", 0))


@dataclass
class RecipeChanges:
    """The changes of a start of a run: checked before anything is written, recorded when all checks have passed."""

    recipe: Recipe
    accept: bool | Callable[[str], bool] = False
    """Whether changes from this step on are wanted (`--change`), or a function that asks."""
    note: str | None = None
    branch_of: Path | None = None
    """The checkpoint of another run (`--from-checkpoint`)."""
    resume: Wanted = "latest"
    lines: list[Content] | None = None
    """The new history, to be written."""

    def check(self, folder: Path) -> bool:
        """Whether the run changes from this step on. RecipeError if it may not, or not without `--change`."""
        checkpoint = self.branch_of
        began = began_from(folder)
        if checkpoint is not None:
            if not checkpoint.is_dir():
                raise CheckpointError(
                    f"--from-checkpoint {checkpoint}: no such folder in {Path.cwd()}."
                )
            if began != checkpoint.resolve() and (began is not None or has_results(folder)):
                raise RecipeError(
                    f"{folder} is another run, which did not begin from {checkpoint}. Name the new run: name=..."
                )
            if began is None:
                refuse_damaged(checkpoint, "--from-checkpoint")
                proposal = propose(self.recipe, folder, checkpoint, is_branch=True)
                if proposal is not None:
                    proposal.check()
                    print_once(str(proposal))
                return True
            self.branch_of = None  # a later start
        elif self.resume == "none":  # any recipe may start over
            return True
        elif (
            isinstance(self.resume, Path)
            and (self.resume.parent / RECIPE).exists()
            and not has_results(folder)
        ):
            raise RecipeError(
                f"--resume {self.resume}: {folder} is a new run. To begin it from a checkpoint of another:"
                f" --from-checkpoint {self.resume}."
            )
        if read_record(folder) is None and published_checkpoints(folder):
            self.agree_without_record(folder)
            return True
        proposal = self.of_run(folder)
        if proposal is None:
            if self.note is not None:
                print_once("--note: the recipe has no new change, so the note is not recorded.")
            return False
        proposal.check()
        if not proposal.from_this_step and (self.resume != "latest" or not proposal.drops_later):
            return False
        self.agree(proposal)
        return True

    def agree_without_record(self, folder: Path) -> None:
        """RecipeError if the run's recipe is lost, unless `--change` accepts this one."""
        text = f"{folder}: {RECIPE} or {HISTORY} is lost or damaged, so this recipe cannot be compared."
        is_accepted = self.accept(text) if callable(self.accept) else self.accept
        if not is_accepted:
            raise RecipeError(
                f"{text} Restore it, accept this recipe with --change, or start another run: name=..., or --new."
            )

    def agree(self, proposal: Proposal) -> None:
        """Show the changes. RecipeError if they are not wanted."""
        remedy = "Otherwise restore the recipe, or give the run another name: name=..., or --new."
        if callable(self.accept):
            if not self.accept(str(proposal)):
                raise RecipeError(
                    f"{proposal.folder}: the changed recipe was not accepted. {remedy}"
                )
        elif not self.accept:
            raise RecipeError(f"{proposal}\nApply this with --change (and --note REASON). {remedy}")
        else:
            print_once(str(proposal))

    def of_run(self, folder: Path) -> Proposal | None:
        """The changes of a started run at the checkpoint to resume from."""
        if isinstance(self.resume, Path):
            refuse_damaged(self.resume, "--resume")
            return propose(self.recipe, folder, self.resume, goes_back=True)
        record = read_record(folder)
        if record is None or not changes_between(record.recipe, self.recipe):
            return None  # the usual case, without reading a checkpoint
        return propose(self.recipe, folder, newest_usable(folder))

    def part(self, run: Run, point: ResumePoint) -> Part:
        """Return the next part of the run, with its changes. For the main process.

        Raises:
            CheckpointError: the mixture changes, but the checkpoint lacks the position of its data.
        """
        checkpoint = point.checkpoint
        is_branch = self.branch_of is not None
        goes_back = isinstance(self.resume, Path)
        if self.resume == "none":
            self.lines = []
            return Part(self.recipe)
        step = steps_in(checkpoint)
        record = read_record(run.folder)
        lines = [] if record is None else record.history
        proposal = propose(
            self.recipe, run.folder, checkpoint, is_branch=is_branch, goes_back=goes_back
        )
        if proposal is None:
            return part_after(lines, step, self.recipe)
        position = {} if checkpoint is None else read_object(checkpoint / POSITION)
        if proposal.changes_data and step and "positions" not in position:
            raise CheckpointError(
                f"{checkpoint} lacks the position of its data, so the mixture cannot change. Restore `data`."
            )
        line = {
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "step": step,
            "row": position.get("row", 0),
            "note": self.note,
            "changes": list(map(described, proposal.changes)),
            "new_stretch": proposal.changes_data and step > 0,
            "positions": position.get("positions", {}),
            "fingerprint": position.get("fingerprint"),
            "recipe": proposal.before.model_dump(mode="json", by_alias=True),
            "inputs": recorded_inputs(proposal.source, checkpoint),
            "from": str(checkpoint) if proposal.is_branch else None,
        }
        # Changes at later steps are dropped if the run has gone back before them and continues in another way.
        earlier_lines = [
            change_line
            for change_line in proposal.lines
            if change_line["step"] <= step or not proposal.drops_later
        ]
        new = [line] if proposal.changes or is_branch else []
        self.lines = sorted(
            [*earlier_lines, *new], key=lambda change_line: int(change_line["step"])
        )
        return part_after(self.lines, step, self.recipe)

    @property
    def are_new(self) -> bool:
        """Whether this start changes the recipe, or begins from another checkpoint."""
        return self.lines is not None

    def inputs(self, run: Run, point: ResumePoint, recipe: Recipe) -> RunInputs:
        """The inputs of this start, compared with those of earlier ones. For the main process."""
        recorded = {}
        if self.resume != "none":
            recorded = recorded_inputs(run.folder, point.checkpoint)
        inputs = RunInputs(run.folder, recipe, recorded)
        inputs.refuse_changed(steps_in(point.checkpoint), self.accept)
        return inputs

    def record(self, run: Run) -> None:
        """Write the history and the recipe of now. For the main process."""
        if self.lines is not None:
            if self.branch_of is not None and not has_results(run.folder):
                copy_record(self.branch_of, run.folder, steps_in(self.branch_of))
            write_record(run.folder, RecipeRecord(self.recipe, self.lines))
            (run.folder / INPUTS).unlink(missing_ok=True)  # this start describes them again


def copy_record(checkpoint: Path, branch: Path, step: int) -> None:
    """Copy what the run of a checkpoint measured until this step, for the branch's verdict and reproduction."""
    for name in (METRICS, SAMPLES):
        if (checkpoint.parent / name).exists():
            shutil.copy(checkpoint.parent / name, branch)
            keep_lines_until(branch / name, step)
    for at, path in saved_losses(checkpoint.parent).items():
        if at <= step:
            (branch / HELD_OUT).mkdir(exist_ok=True)
            shutil.copy(path, branch / HELD_OUT)


class EndOfPart(TrainerCallback):
    """Saves and stops at the step of the run's next change."""

    def __init__(self, end: int | None) -> None:
        # not reached if the run stops early
        self.end = end
        self.is_reached = False

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if state.global_step == self.end:
            self.is_reached = True
            control.should_save = control.should_training_stop = True

    def restart_at_end(self) -> None:
        """Raise RestartNeeded if the recipe changes here."""
        if self.is_reached:
            raise RestartNeeded(
                f"The recipe changes after step {self.end} (history.jsonl): the run restarts with it."
            )


def described(change: Change) -> Content:
    values = (change.before, change.after)
    before, after = (None if value is UNSET else without_defaults(value) for value in values)
    return {"key": change.key, "kind": change.kind, "before": before, "after": after}
