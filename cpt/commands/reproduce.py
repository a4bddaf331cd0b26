"""`cpt reproduce RUN`: repeat a run from its record, and report whether the results are bit-equal."""

import contextlib
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

# first: it silences libraries that the others import
from cpt.command_line import AsJson, Launcher, LocalRank, print_json, run_command

# isort: split
import typer

from cpt.analysis.compare import by_short_path, environment_rows
from cpt.data.readers.sources import contents_of, states_of
from cpt.distributed import environment_alone, print_once
from cpt.errors import (
    CheckpointError,
    CptError,
    DataError,
    ResourceError,
    RestartNeeded,
    TrainingError,
)
from cpt.files import differing_files, hashes_of
from cpt.hardware import count_cpu_cores
from cpt.launch.supervise import (
    command_of_attempt,
    refuse_launcher,
    refuse_more_than_the_machine_holds,
)
from cpt.process import MOST_WITHOUT_PROGRESS, Child
from cpt.recipe.load import dump_recipe, load_recipe
from cpt.recipe.rules import reported_name
from cpt.recipe.schema import DocumentSource, Recipe
from cpt.runs.folder import (
    ENVIRONMENT,
    EVALUATED,
    EXPORT,
    INPUTS,
    METRICS,
    OF_TIME,
    RECIPE,
    Content,
    RunRecord,
    find_run,
    get,
    get_dict,
    read_object,
    read_objects,
    read_recipe,
    read_run,
)
from cpt.runs.history import write_history
from cpt.runs.record import Run, deciding_variables, describe_environment

if TYPE_CHECKING:
    from cpt.training.trainer import CPTTrainer

DIFFERS = 3  # the exit code; 2 means a user error
SUFFIX = "-reproduced"
TAG = "reproduces "
OF_A_MACHINE = "CUDA_VISIBLE_DEVICES"  # device numbers of one machine
OF_A_START = ("variable ", "host_memory_gib", "platform")  # restored, or irrelevant to results
DECIDED = ("loss", "grad_norm")
"""Metrics determined by recipe, data and code; those of evaluations are too."""


@dataclass(frozen=True)
class Reproduction:
    logs: int
    """Number of compared logs with a loss."""
    evaluations: int
    last_step: int
    difference: dict[str, Any] | None
    """First difference: step, metric, and its values then and now."""
    weights_differ: list[str] | None
    """Files of the final model that differ; None if a run has no final model."""

    @property
    def is_bit_equal(self) -> bool:
        """Whether there was something to compare, and all of it is equal."""
        return self.logs > 0 and self.difference is None and not self.weights_differ


def command(
    run: Annotated[str, typer.Argument(help="A run's folder, or its name below runs/.")],
    steps: Annotated[
        int | None, typer.Option(help="Number of steps; all by default.", min=1)
    ] = None,
    processes: Annotated[
        int | None, typer.Option(min=1, help="Number of processes; by default as recorded.")
    ] = None,
    launcher: Launcher = None,
    as_json: AsJson = False,
) -> None:
    """Repeat a run from its record. Exit code 3 if losses differ; differences in code, versions and hardware are then
    printed.

    Data, tokenizer and weights must be unchanged; otherwise the changed files are listed and nothing runs.

    Example: cpt reproduce runs/my-run --steps 100
    """
    refuse_launcher("reproduce", sets_processes=processes is not None, launcher=launcher)
    folder = find_run(run)
    record = read_complete(folder)
    num_processes = processes or int(record.environment.get("processes", 1))
    file = (folder / RECIPE).resolve()
    with contextlib.chdir(working_directory(record.environment)):
        recipe = load_recipe(file)
        if launcher is None:
            on_gpus = not recipe.training.get("use_cpu")
            refuse_more_than_the_machine_holds(num_processes, on_gpus=on_gpus)
        refuse_changed_inputs(folder, recipe, record.inputs)
        earlier_recipes = [Recipe.model_validate(line["recipe"]) for line in record.history]
        for line, earlier_recipe in zip(record.history, earlier_recipes, strict=True):
            refuse_changed_inputs(folder, earlier_recipe, get_dict(line, "inputs"))
        environment = {**describe_environment(), "processes": num_processes}
    differences = []
    for row in environment_rows([record.environments, [environment]]):
        if not row.name.startswith(OF_A_START):
            differences.append(f"{row.name}: {row.values[0]} -> {row.values[1]}")
    if not as_json:
        for difference in differences:
            print_once(f"Changed since then: {difference}.")
    repeated_folder = run_again(
        record,
        repetition_of(record, recipe, record.inputs),
        repeated_history(record, earlier_recipes),
        last_step=None if steps is None else first_logged_step(record, steps),
        processes=num_processes,
        launcher=launcher,
        quiet=as_json,
    )
    result = compare_results(record, repeated_folder)
    fingerprint = get(record.inputs, "data", "fingerprint")
    new_fingerprint = get(read_object(repeated_folder / INPUTS), "data", "fingerprint")
    if fingerprint != new_fingerprint:
        differences.append(
            f"rows made from the same files (fingerprint): {fingerprint} -> {new_fingerprint}"
        )
    if as_json:
        content = {
            "bit_equal": result.is_bit_equal,
            **asdict(result),
            "differs": differences,
            "folder": None if result.is_bit_equal else str(repeated_folder),
        }
        print_json(content)
    else:
        print_once("\n".join(report(result, differences)))
    if not result.is_bit_equal:
        if not as_json:
            print_once(f"Compare them: cpt compare {folder} {repeated_folder}")
        raise typer.Exit(DIFFERS)
    shutil.rmtree(repeated_folder)


def first_logged_step(record: RunRecord, steps: int) -> int | None:
    """A logged loss is the mean since the previous log, so a repetition of `steps` ends at the next log."""
    for step in record.metrics.curve("loss", "step")[0]:
        if step >= steps:
            return int(step)
    return None


def repeated_history(record: RunRecord, recipes: Sequence[Recipe]) -> list[Content]:
    """The changes of the run's recipe, for its repetition."""
    history = []
    for line, recipe in zip(record.history, recipes, strict=True):
        repetition = repetition_of(record, recipe, get_dict(line, "inputs"))
        content = repetition.model_dump(mode="json", by_alias=True)
        history.append({**line, "replay": True, "recipe": content})
    return history


def read_complete(folder: Path) -> RunRecord:
    """Read a run's record; CheckpointError if a part needed to repeat the run is missing or damaged."""
    record = read_run(folder)
    missing = [name for name in (RECIPE, ENVIRONMENT, INPUTS) if name in record.missing]
    if "loss" not in record.metrics.names:
        missing.append(f"{METRICS} with a loss")
    if missing:
        raise CheckpointError(
            f"{folder} cannot be repeated. Missing or unreadable: {', '.join(missing)}."
        )
    return record


def working_directory(environment: Content) -> Path:
    """The run's working directory, for relative paths; the current one if it no longer exists."""
    started_in = Path(environment.get("folder", "."))
    return started_in if started_in.is_dir() else Path.cwd()


def refuse_changed_inputs(folder: Path, recipe: Recipe, inputs: Content) -> None:
    """Compare data, tokenizer and weights with their recorded hashes; DataError names each file that differs."""
    from cpt.models.config import hash_weights
    from cpt.tokenizer.load import load_tokenizer
    from cpt.training.inputs import hash_of_tokenizer

    changed = []
    for number, source in enumerate(recipe.data.sources):
        recorded = get_dict(inputs, "data", "sources", reported_name(source), "files")
        changed += changed_files(source, f"data.sources[{number}]", recorded)
    for number, held_out in enumerate(recipe.evaluation.perplexity):
        recorded = get_dict(inputs, "data", "held_out", reported_name(held_out))
        changed += changed_files(held_out, f"evaluation.perplexity[{number}]", recorded)
    try:
        tokenizer_hash = hash_of_tokenizer(load_tokenizer(recipe.tokenizer, recipe.model))
        if get(inputs, "tokenizer", "xxh3") not in (None, tokenizer_hash):
            changed.append(
                f"tokenizer: {get(inputs, 'tokenizer', 'path')} encodes to different ids"
            )
    except CptError as problem:
        changed.append(f"tokenizer: {problem}")
    for part in ("weights", "teacher"):
        hashes = get_dict(inputs, part, "sha256")
        if not hashes:
            continue
        path = get(inputs, part, "path")
        try:
            names = differing_files(hashes, hash_weights(path, get(inputs, part, "revision")))
            changed += [f"{part}: {Path(path) / name} differs" for name in names]
        except (CptError, OSError) as problem:
            changed.append(f"{part}: {path}: {problem}")
    if changed:
        listing = "\n".join(f"  {line}" for line in changed)
        raise DataError(
            f"{folder} cannot be repeated, because its inputs changed:\n{listing}\nRestore them."
        )


def changed_files(source: DocumentSource, key: str, recorded: Mapping[str, str]) -> list[str]:
    if not recorded:  # never read completely: the rows' fingerprints are compared after the run
        return []
    try:
        states = states_of(source, key)
    except CptError as problem:
        return [f"{key}: {problem}"]
    hashes = contents_of(states)
    if not hashes:  # a function has no files
        return []
    names = differing_files(by_short_path(recorded), by_short_path(hashes))
    return [f"{key}: {name} differs" for name in names]


def repetition_of(record: RunRecord, recipe: Recipe, inputs: Content) -> Recipe:
    """The recipe to run: the run's, with the values chosen for `auto`, without trackers, callbacks and archive."""
    recorded = get_dict(inputs, "training")
    training = dict(recipe.training)
    for key, value in recipe.training.items():
        if value == "auto":
            training[key] = recorded.get(key, value)
    if recorded.get("deepspeed"):
        # The recorded content: the file may have changed, or come from accelerate's config.
        training["deepspeed"] = recorded["deepspeed"]
    model = recipe.model
    dtype = get(inputs, "weights", "dtype")
    is_sharded = training.get("deepspeed") or training.get("fsdp")
    if model.dtype == "auto" and model.lora is None and dtype is not None and not is_sharded:
        model = model.model_copy(update={"dtype": dtype})
    if get(record.environment, "hardware", "gpus") == []:
        training["use_cpu"] = True
    checkpoints = recipe.checkpoints.model_copy(
        update=dict.fromkeys(("archive", "weights_every_steps", "average"))
    )
    evaluation = recipe.evaluation.model_copy(
        update={"tasks_every_tokens": None, "tasks_device": "auto"}
    )
    folder = record.folder.resolve()
    update = {
        "name": f"{folder.name}{SUFFIX}",
        "output_dir": folder.parent,
        "tags": [*recipe.tags, f"{TAG}{folder.name}"],
        "monitoring": type(recipe.monitoring)(),
        "checkpoints": checkpoints,
        "evaluation": evaluation,
        "training": training,
        "model": model,
    }
    return recipe.model_copy(update=update)


def run_again(
    record: RunRecord,
    recipe: Recipe,
    history: Sequence[Content],
    *,
    last_step: int | None,
    processes: int,
    launcher: str | None,
    quiet: bool,
) -> Path:
    """Run the recipe until `last_step`, and return its folder; TrainingError if it fails. The changes in `history` are
    made at their steps."""
    folder = empty_folder(recipe)
    if history:
        folder.mkdir(parents=True)
        write_history(folder, history)
    file = folder.with_name(f".{folder.name}.yaml")
    file.write_text(dump_recipe(recipe), encoding="utf-8")
    arguments = [str(file)]
    if last_step is not None:
        arguments += ["--steps", str(last_step)]
    program = command_of_attempt(arguments, processes, launcher, Path(__file__))
    variables = environment_of(record)
    try:
        for _ in range(len(history) + 1 + MOST_WITHOUT_PROGRESS):
            child = Child(
                program,
                inherits=variables,
                folder=working_directory(record.environment),
                output=sys.stderr if quiet else None,
            )
            exit_code, _ = child.wait_for_end()
            if Run(folder).status().get("error") != RestartNeeded.__name__:
                break
    finally:
        file.unlink(missing_ok=True)
    if exit_code:
        status = Run(folder).status()
        reason = f"exit code {exit_code}"
        if "error" in status:
            reason = f"{status['error']}: {status['message']}"
        raise TrainingError(f"the repetition failed ({reason}). Its folder: {folder}.")
    return folder


def empty_folder(recipe: Recipe) -> Path:
    """Remove an earlier repetition, and return its folder; ResourceError if the folder is not a repetition."""
    folder = recipe.output_dir / recipe.name
    if folder.exists():
        if recipe.tags[-1] not in (read_recipe(folder / RECIPE).get("tags") or []):
            raise ResourceError(
                f"{folder} exists and is not a repetition of this run. Move or rename it."
            )
        shutil.rmtree(folder)
    return folder


def environment_of(record: RunRecord) -> dict[str, str]:
    """This process's environment variables, with those of the run that can change results."""
    variables = {**get_dict(record.environment, "variables")}
    cores = get(record.environment, "hardware", "cores")
    has_other_cores = cores is not None and cores != count_cpu_cores()
    if has_other_cores and record.environment.get("processes", 1) == 1:
        # torch's default is the number of cores, and it changes the order of sums.
        variables.setdefault("OMP_NUM_THREADS", str(cores))
    variables.pop(OF_A_MACHINE, None)
    replaced = deciding_variables().keys() - {OF_A_MACHINE}
    inherited = {name: value for name, value in os.environ.items() if name not in replaced}
    # Otherwise Python imports from the program's folder first, whose files could shadow other modules.
    return {
        **inherited,
        **variables,
        "PYTHONSAFEPATH": "1",
        "PYTHONPATH": environment_alone()["PYTHONPATH"],
    }


def compare_results(record: RunRecord, repeated_folder: Path) -> Reproduction:
    """Compare the metrics and final weights that both runs have."""
    before = decided_metrics(record.folder)
    after = decided_metrics(repeated_folder)
    common = [key for key in before if key in after]
    difference = None
    for step, metric in common:
        then = before[step, metric]
        value_after = after[step, metric]
        if repr(then) != repr(value_after):  # repr has all digits, and NaN equals NaN
            difference = {"step": step, "metric": metric, "then": then, "now": value_after}
            break
    weights = hashes_of_weights(record.folder)
    repeated_weights = hashes_of_weights(repeated_folder)
    weights_differ = None
    if weights and repeated_weights:
        weights_differ = differing_files(weights, repeated_weights)
    return Reproduction(
        logs=len([step for step, name in common if name == "loss"]),
        evaluations=len({step for step, name in common if name.startswith(EVALUATED)}),
        last_step=max((step for step, _ in common), default=0),
        difference=difference,
        weights_differ=weights_differ,
    )


def hashes_of_weights(run: Path) -> dict[str, str]:
    return hashes_of({path.name: path for path in (run / EXPORT).glob("*.safetensors")})


def decided_metrics(folder: Path) -> dict[tuple[int, str], float]:
    """(step, name) -> value, of the metrics that recipe, data and code determine."""
    metrics = {}
    for line in read_objects(folder / METRICS):
        for name, value in line.items():
            if name in DECIDED or (name.startswith(EVALUATED) and not name.endswith(OF_TIME)):
                metrics[(line["step"], name)] = value
    return metrics


def report(result: Reproduction, differences: Sequence[str]) -> list[str]:
    if result.is_bit_equal:
        weights = "" if result.weights_differ is None else ", and the final weights"
        evaluations = "1 evaluation"
        if result.evaluations != 1:
            evaluations = f"{result.evaluations:,} evaluations"
        counts = f"{result.logs:,} logged losses and {evaluations}"
        return [f"Bit-equal: {counts} up to step {result.last_step}{weights}."]
    difference = result.difference
    if difference is not None:
        line = (
            f"NOT equal: {difference['metric']} at step {difference['step']} was {difference['then']},"
            f" now {difference['now']}."
        )
    elif result.weights_differ:
        files = ", ".join(result.weights_differ)
        line = f"NOT equal: losses are equal, but final weights differ: {files}."
    else:
        line = "NOT compared: the two runs logged no loss at the same step."
    if differences:
        return [line, "Changed since then:", *(f"  {difference}" for difference in differences)]
    same = "Code, data, versions and hardware are the same"
    return [line, f"{same}. On GPUs, train with `full_determinism: true` in `training:`."]


def run_recipe(
    recipe: Annotated[Path, typer.Argument(help="The recipe of the repetition.")],
    steps: Annotated[int | None, typer.Option(help="End at the log of this step.", min=1)] = None,
    local_rank: LocalRank = None,
) -> None:
    from cpt.commands.rehearse_program import EndAtLog, train_in_own_process

    def ready(trainer: "CPTTrainer") -> None:
        if steps is not None:
            trainer.add_callback(EndAtLog(steps))

    train_in_own_process(recipe, ready)


if __name__ == "__main__":
    run_command(run_recipe)
