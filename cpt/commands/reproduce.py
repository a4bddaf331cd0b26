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
from cpt.files import size_and_hash
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
SUFFIX, TAG = "-reproduced", "reproduces "
OF_A_MACHINE = "CUDA_VISIBLE_DEVICES"  # device numbers of one machine
OF_A_START = ("variable ", "host_memory_gib", "platform")  # restored, or irrelevant to results
DECIDED = (
    "loss",
    "grad_norm",
)  # metrics determined by recipe, data and code; those of evaluations are too


@dataclass(frozen=True)
class Reproduction:
    logs: int  # number of compared logs with a loss
    evaluations: int
    last_step: int
    difference: dict[str, Any] | None  # first difference: step, metric, and its values then and now
    weights_differ: (
        list[str] | None
    )  # files of the final model that differ; None if a run has no final model

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
    environment = record.environment
    number = processes or int(environment.get("processes", 1))
    file = (folder / RECIPE).resolve()
    with contextlib.chdir(place_of(environment)):
        recipe = load_recipe(file)
        if launcher is None:
            refuse_more_than_the_machine_holds(number, on_gpus=not recipe.training.get("use_cpu"))
        earlier = [
            (Recipe.model_validate(line["recipe"]), get_dict(line, "inputs"))
            for line in record.history
        ]
        for one, inputs in [(recipe, record.inputs), *earlier]:
            refuse_changed_inputs(folder, one, inputs)
        now = {**describe_environment(), "processes": number}
    # A logged loss is the mean since the previous log, so the repetition ends at a log.
    logged = record.metrics.curve("loss", "step")[0]
    last = None if steps is None else next((int(one) for one in logged if one >= steps), None)
    rows = [
        row
        for row in environment_rows([record.environments, [now]])
        if not row.name.startswith(OF_A_START)
    ]
    differences = [f"{row.name}: {row.values[0]} -> {row.values[1]}" for row in rows]
    if not as_json:
        for difference in differences:
            print_once(f"Changed since then: {difference}.")
    words = ["--steps", str(last)] if last else []
    history = [
        {
            **line,
            "replay": True,
            "recipe": repetition_of(record, one, inputs).model_dump(mode="json", by_alias=True),
        }
        for line, (one, inputs) in zip(record.history, earlier, strict=True)
    ]
    repetition = repetition_of(record, recipe, record.inputs)
    again = run_again(record, repetition, history, words, number, launcher, quiet=as_json)
    result = compare_results(record, again)
    old_rows, new_rows = (
        get(one, "data", "fingerprint") for one in (record.inputs, read_object(again / INPUTS))
    )
    if old_rows != new_rows:
        differences.append(f"rows made from the same files (fingerprint): {old_rows} -> {new_rows}")
    if as_json:
        kept = None if result.is_bit_equal else str(again)
        found = {
            "bit_equal": result.is_bit_equal,
            **asdict(result),
            "differs": differences,
            "folder": kept,
        }
        print_json(found)
    else:
        print_once("\n".join(report(result, differences)))
    if not result.is_bit_equal:
        if not as_json:
            print_once(f"Compare them: cpt compare {folder} {again}")
        raise typer.Exit(DIFFERS)
    shutil.rmtree(again)


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


def place_of(environment: Content) -> Path:
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
        found = hash_of_tokenizer(load_tokenizer(recipe.tokenizer, recipe.model))
        if get(inputs, "tokenizer", "xxh3") not in (None, found):
            changed.append(
                f"tokenizer: {get(inputs, 'tokenizer', 'path')} encodes to different ids"
            )
    except CptError as problem:
        changed.append(f"tokenizer: {problem}")
    for part in ("weights", "teacher"):
        hashes, path = get_dict(inputs, part, "sha256"), get(inputs, part, "path")
        try:
            now = hash_weights(path, get(inputs, part, "revision")) if hashes else {}
            changed += [
                f"{part}: {Path(path) / name} differs" for name in differing_files(hashes, now)
            ]
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
    now = contents_of(states)
    names = (
        differing_files(by_short_path(recorded), by_short_path(now)) if now else []
    )  # a function has no files
    return [f"{key}: {name} differs" for name in names]


def differing_files(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Names of the files that changed or are missing or new, from the hashes of two times."""
    return sorted(name for name in {**then, **now} if then.get(name) != now.get(name))


def repetition_of(record: RunRecord, recipe: Recipe, inputs: Content) -> Recipe:
    """The recipe to run: the run's, with the values chosen for `auto`, without trackers, callbacks and archive."""
    chosen = get_dict(inputs, "training")
    training = {
        key: chosen.get(key, value) if value == "auto" else value
        for key, value in recipe.training.items()
    }
    if chosen.get(
        "deepspeed"
    ):  # the recorded content: the file may have changed, or come from accelerate's config
        training["deepspeed"] = chosen["deepspeed"]
    model, dtype = recipe.model, get(inputs, "weights", "dtype")
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
    words: Sequence[str],
    processes: int,
    launcher: str | None,
    *,
    quiet: bool,
) -> Path:
    """Run the recipe with these options of `run_recipe`, and return its folder; TrainingError if it fails. The
    changes in `history` are made at their steps."""
    folder = empty_folder(recipe)
    if history:
        folder.mkdir(parents=True)
        write_history(folder, history)
    file = folder.with_name(f".{folder.name}.yaml")
    file.write_text(dump_recipe(recipe), encoding="utf-8")
    program = command_of_attempt([str(file), *words], processes, launcher, Path(__file__))
    variables, output = environment_of(record), sys.stderr if quiet else None
    try:
        for _ in range(len(history) + 1 + MOST_WITHOUT_PROGRESS):
            child = Child(
                program, inherits=variables, folder=place_of(record.environment), output=output
            )
            code, _ = child.wait_for_end()
            if Run(folder).status().get("error") != RestartNeeded.__name__:
                break
    finally:
        file.unlink(missing_ok=True)
    if code:
        status = Run(folder).status()
        why = (
            f"{status['error']}: {status['message']}" if "error" in status else f"exit code {code}"
        )
        raise TrainingError(f"the repetition failed ({why}). Its folder: {folder}.")
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
    if (
        cores is not None
        and cores != count_cpu_cores()
        and record.environment.get("processes", 1) == 1
    ):
        variables.setdefault(
            "OMP_NUM_THREADS", str(cores)
        )  # torch's default is the cores; affects sums
    variables.pop(OF_A_MACHINE, None)
    replaced = deciding_variables().keys() - {OF_A_MACHINE}
    kept = {name: value for name, value in os.environ.items() if name not in replaced}
    # Otherwise Python imports from the program's folder first, whose files could shadow other modules.
    return {
        **kept,
        **variables,
        "PYTHONSAFEPATH": "1",
        "PYTHONPATH": environment_alone()["PYTHONPATH"],
    }


def compare_results(record: RunRecord, again: Path) -> Reproduction:
    """Compare the metrics and final weights that both runs have."""
    before, after = (decided_metrics(folder) for folder in (record.folder, again))
    common = [key for key in before if key in after]
    differing = (
        (*key, before[key], after[key]) for key in common if repr(before[key]) != repr(after[key])
    )
    first = next(differing, None)  # repr has all digits, and NaN equals NaN
    models = (folder / EXPORT for folder in (record.folder, again))
    then, now = (
        {path.name: size_and_hash(path) for path in model.glob("*.safetensors")} for model in models
    )
    return Reproduction(
        logs=sum(name == "loss" for _, name in common),
        evaluations=len({step for step, name in common if name.startswith(EVALUATED)}),
        last_step=max((step for step, _ in common), default=0),
        difference=first and dict(zip(("step", "metric", "then", "now"), first, strict=True)),
        weights_differ=differing_files(then, now) if then and now else None,
    )


def decided_metrics(folder: Path) -> dict[tuple[int, str], float]:
    """(step, name) -> value, of the metrics that recipe, data and code determine."""
    return {
        (line["step"], name): value
        for line in read_objects(folder / METRICS)
        for name, value in line.items()
        if name in DECIDED or (name.startswith(EVALUATED) and not name.endswith(OF_TIME))
    }


def report(result: Reproduction, differences: Sequence[str]) -> list[str]:
    if result.is_bit_equal:
        weights = "" if result.weights_differ is None else ", and the final weights"
        evaluations = f"{result.evaluations:,} evaluation{'s' * (result.evaluations != 1)}"
        counts = f"{result.logs:,} logged losses and {evaluations}"
        return [f"Bit-equal: {counts} up to step {result.last_step}{weights}."]
    if found := result.difference:
        lines = [
            f"NOT equal: {found['metric']} at step {found['step']} was {found['then']}, now {found['now']}."
        ]
    elif result.weights_differ:
        lines = [
            f"NOT equal: losses are equal, but final weights differ: {', '.join(result.weights_differ)}."
        ]
    else:
        lines = ["NOT compared: the two runs logged no loss at the same step."]
    if differences:
        return [*lines, "Changed since then:", *(f"  {difference}" for difference in differences)]
    same = "Code, data, versions and hardware are the same"
    return [*lines, f"{same}. On GPUs, train with `full_determinism: true` in `training:`."]


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
