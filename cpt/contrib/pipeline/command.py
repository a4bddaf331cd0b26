"""`cpt pipeline FILE`: run several recipes in sequence. Finished runs are skipped, interrupted runs resume."""

import json
import shlex
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from cpt.command_line import Launcher, Processes, Supervise, show_log
from cpt.distributed import print_once
from cpt.errors import Interrupted, RecipeError
from cpt.formatting import open_console
from cpt.launch.supervise import command_of_attempt, refuse_launcher
from cpt.plugins import did_you_mean
from cpt.process import Child
from cpt.recipe.load import changes_between, load_with_tree, saved_recipe
from cpt.recipe.schema import Recipe
from cpt.recipe.tree import Mistakes, Node, plain, read_or_raise
from cpt.runs.folder import RECIPE
from cpt.runs.record import Run, has_results

KEYS = ("name", "description", "steps")


@dataclass(frozen=True)
class Step:
    number: int  # from 1
    file: Path
    overrides: tuple[str, ...]
    recipe: Recipe
    root: Node  # the recipe's tree, for line numbers in messages

    @property
    def run(self) -> Run:
        return Run(self.recipe.output_dir / self.recipe.name)


@dataclass(frozen=True)
class Pipeline:
    name: str
    steps: tuple[Step, ...]

    def made_by_others(self, step: Step) -> list[Step]:
        """The steps whose model, tokenizer, teacher or reward model this step uses."""
        recipe = step.recipe
        names = [
            recipe.model.path,
            recipe.tokenizer.path,
            recipe.training.get("teacher_model_name_or_path"),
            *(reward.options.get("path") for reward in recipe.rewards),
        ]
        folders: set[Path] = set()
        for name in names:
            if isinstance(name, str) and name:
                path = Path(name).expanduser().absolute()
                folders |= {path, *path.parents}
        return [other for other in self.steps if other.run.folder.absolute() in folders]


def command(
    file: Annotated[
        Path, typer.Argument(help="A YAML file with `name` and `steps`, a list of recipes.")
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="key.path=value, for every recipe.")
    ] = None,
    supervise: Supervise = False,
    processes: Processes = 1,
    launcher: Launcher = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only check the recipes and show the status.")
    ] = False,
) -> None:
    """Run recipes one after the other; repeat the command to resume.

    Finished runs are skipped.

    Example: cpt pipeline pipeline.yaml --dry-run
    """
    show_log()
    refuse_launcher("pipeline", sets_processes=processes > 1, launcher=launcher)
    pipeline = load_pipeline(file, overrides or ())
    print_status(pipeline)
    num_steps = len(pipeline.steps)
    num_wrong = sum(has_mistakes(pipeline, step) for step in pipeline.steps)
    if num_wrong:
        print_once(f"{num_wrong} of {num_steps} steps cannot run. Nothing was started.")
        raise typer.Exit(2)
    unfinished = [step for step in pipeline.steps if not step.run.is_finished]
    if dry_run or not unfinished:
        return
    options = ["--processes", str(processes)]
    if launcher is not None:
        options = ["--launcher", launcher]
    if supervise:
        options.append("--supervise")
    for step in unfinished:
        title = f"step {step.number} of {num_steps}, {step.recipe.name} ({step.recipe.stage})"
        print_once(f"{title}: {step.run.folder}")
        arguments = [str(step.file), *step.overrides, *options]
        exit_code, forwarded = Child(command_of_attempt(arguments, 1, None)).wait_for_end()
        if forwarded or not step.run.is_finished:
            end(pipeline, step, file, exit_code, forwarded)
    print_status(pipeline)


def has_mistakes(pipeline: Pipeline, step: Step) -> bool:
    """Check a step, and print what is wrong.

    If an earlier step has not made its model yet, it is checked with the model that the earlier step starts from. If
    its teacher or a reward model is missing, only the recipe is checked.
    """
    if step.run.is_finished:
        return False
    step = with_existing_model(pipeline, step)
    waiting = [other for other in pipeline.made_by_others(step) if not other.run.is_finished]
    if waiting:
        first = waiting[0]
        print_once(
            f"{step.file}: continues from {first.run.folder}, so files and memory are checked after step"
            f" {first.number}."
        )
        return False
    from cpt.planning.gate import print_report  # torch, which takes seconds

    findings = print_report(step.file, step.recipe, step.root)
    return bool(findings.mistakes or findings.blockers)


def with_existing_model(pipeline: Pipeline, step: Step) -> Step:
    """The step with the model and tokenizer that the first unfinished step before it starts from, which have the same
    shape."""
    recipe = step.recipe
    for other in reversed(pipeline.steps[: step.number - 1]):
        if other.run.is_finished:
            continue
        folder = other.run.folder.absolute()
        path_of_tokenizer = recipe.tokenizer.path
        if path_of_tokenizer is None:
            path_of_tokenizer = recipe.model.path
        if is_below(path_of_tokenizer, folder):
            recipe = recipe.model_copy(update={"tokenizer": other.recipe.tokenizer})
        if is_below(recipe.model.path, folder):
            base = other.recipe.model
            names = ("path", "revision", "config", "from_scratch", "import_", "trust_remote_code")
            update = {name: getattr(base, name) for name in names}
            update["parameters"] = None
            update["rope"] = recipe.model.rope or base.rope
            recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update=update)})
    return replace(step, recipe=recipe)


def is_below(path: str | None, folder: Path) -> bool:
    if path is None:
        return False
    absolute = Path(path).absolute()
    return folder == absolute or folder in absolute.parents


def end(pipeline: Pipeline, step: Step, file: Path, exit_code: int, forwarded: int) -> None:
    """Report how the step ended and how to resume; raise Interrupted if a signal stopped it, else typer.Exit with its
    exit code."""
    print_status(pipeline)
    status = step.run.status()
    title = f"step {step.number}, {step.recipe.name},"
    remedy = f"The same command resumes it: cpt pipeline {file}"
    if forwarded or exit_code == Interrupted.exit_code:
        received = f"{signal.Signals(forwarded).name}: " if forwarded else ""
        steps = f"stopped at step {status.get('step', 0)} of its run"
        raise Interrupted(f"{received}{title} {steps}. {remedy}")
    reason = str(status.get("message") or "see its output above").splitlines()[0]
    print_once(f"{title} ended with exit code {exit_code}: {reason}")
    print_once(f"Later steps were not started. Fix the cause. {remedy}")
    raise typer.Exit(max(exit_code, 1))


def print_status(pipeline: Pipeline) -> None:
    table = Table("step", "stage", "run", "status", title=pipeline.name, title_justify="left")
    for step in pipeline.steps:
        state = "finished"
        if not step.run.is_finished:
            status = step.run.status()
            state = str(status.get("state", "waiting"))
            if state != "finished" and "step" in status and "steps" in status:
                state += f" at {status['step']} of {status['steps']}"
        table.add_row(str(step.number), step.recipe.stage, str(step.run.folder), state)
    open_console().print(table, markup=False)


def load_pipeline(path: Path, overrides: Sequence[str] = ()) -> Pipeline:
    """Read the file and all of its recipes, with `overrides` on top of each; RecipeError lists every mistake with its
    line."""
    mistakes = Mistakes()
    root = read_or_raise(path, mistakes)
    sections = root.value
    for key in sections.keys() - set(KEYS):
        hint = f"{did_you_mean(key, KEYS)} Keys: {', '.join(KEYS)}"
        mistakes.add(sections[key].position, f"`{key}` is not a key of a pipeline.{hint}")
    if "name" not in sections or not isinstance(sections["name"].value, str):
        mistakes.add(root.position, "`name` is missing: the pipeline's name")
    nodes = sections["steps"].value if "steps" in sections else []
    if not isinstance(nodes, list) or not nodes:
        example = "`steps: [{recipe: pretrain.yaml}, {recipe: sft.yaml}]`"
        mistakes.add(root.position, f"`steps` is missing: a list of recipes, {example}")
        mistakes.raise_if_any()
    steps = []
    problems = []
    for number, node in enumerate(nodes, start=1):
        keys = plain(node)
        if not isinstance(keys, dict) or not isinstance(keys.get("recipe"), str):
            example = "`{recipe: sft.yaml, name: chat}`"
            mistakes.add(
                node.position,
                f"step {number}: `recipe` is missing, the path of a YAML file: {example}",
            )
            continue
        file = path.parent / Path(keys.pop("recipe")).expanduser()
        changes = (*as_overrides(keys), *overrides)
        try:
            recipe, tree = load_with_tree(file, changes)
            steps.append(
                Step(number=number, file=file, overrides=changes, recipe=recipe, root=tree)
            )
        except RecipeError as problem:
            problems.append(f"step {number} ({file}):\n{problem}")
    mistakes.raise_if_any()
    pipeline = Pipeline(str(sections["name"].value), tuple(steps))
    problems += [f"{path}: {problem}" for problem in conflicts(pipeline)]
    if problems:
        raise RecipeError("\n".join(problems))
    return pipeline


def as_overrides(keys: Mapping[str, Any], above: str = "") -> Iterator[str]:
    """Convert `{model: {path: x}}` or `{model.path: x}` to the command line's `model.path="x"`."""
    for key, value in keys.items():
        if isinstance(value, dict) and value:
            yield from as_overrides(value, f"{above}{key}.")
        else:
            yield f"{above}{key}={json.dumps(value)}"


def conflicts(pipeline: Pipeline) -> Iterator[str]:
    """Yield steps that share a run, need the model of a later step, or whose run has another recipe."""
    for step in pipeline.steps:
        folder = step.run.folder
        for other in pipeline.steps[: step.number - 1]:
            if other.run.folder == folder:
                yield f"steps {other.number} and {step.number} are the same run, {folder}. Give one another `name`."
        for other in pipeline.made_by_others(step):
            if other.number >= step.number:
                yield f"step {step.number} continues from {other.run.folder}. Put step {other.number} before it."
        if (folder / RECIPE).exists() and has_results(folder):
            yield from refused_changes(step)


def refused_changes(step: Step) -> Iterator[str]:
    """Yield why the step's run cannot continue with its recipe: only free keys change without being asked."""
    folder = step.run.folder
    with suppress(RecipeError):  # the step writes a damaged one again
        changes = changes_between(saved_recipe(folder), step.recipe)
        changes = [change for change in changes if change.kind != "free"]
        if not changes:
            return
        remedy = "Give the step another `name`, or remove the folder."
        if all(change.kind == "from_step" for change in changes):
            arguments = shlex.join([str(step.file), *step.overrides])
            remedy = f"Apply the change first: cpt train {arguments} --change"
        listing = "\n".join(f"  {change}" for change in changes)
        yield f"step {step.number}: {folder} is a run of another recipe (there -> here):\n{listing}\n{remedy}"
