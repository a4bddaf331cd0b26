"""`cpt verdict RUN`: measure a finished run against its base, and write its verdict."""

import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cpt.command_line import Processes, hide_transformers_bars, run_command, show_log
from cpt.distributed import (
    environment_alone,
    is_main_process,
    join_processes,
    leave_processes,
    print_once,
)
from cpt.errors import CheckpointError, Interrupted
from cpt.evaluation.reports import ScoreReport
from cpt.evaluation.sentences import signed
from cpt.formatting import format_count, open_console
from cpt.launch.supervise import command_of_attempt, refuse_more_than_the_machine_holds
from cpt.process import Child
from cpt.recipe.load import saved_recipe
from cpt.runs.folder import VERDICT_PAGE
from cpt.runs.record import Run

if TYPE_CHECKING:
    from cpt.evaluation.verdict import SetVerdict, Verdict

SECONDS_FOR_OTHERS = 6 * 3600  # a process waits so long for the slowest one


def command(
    run: Annotated[Path, typer.Argument(help="The folder of a finished run.")],
    batch_size: Annotated[
        int, typer.Option(min=1, help="Rows in one forward pass; no result depends on it.")
    ] = 8,
    processes: Processes = 1,
) -> None:
    """Evaluate a finished run against its base, as `cpt train` does at its end: held-out text, domain test, tasks,
    contamination; one page.

    Example: cpt verdict runs/my-run
    """
    show_log()
    finished = Run(run)
    if not run.is_dir() or not finished.is_finished:
        raise CheckpointError(
            f"{run} is not a finished run. Give its folder, or let it finish: cpt train RECIPE"
        )

    import torch

    hide_transformers_bars()
    if processes > 1:
        refuse_more_than_the_machine_holds(processes, on_gpus=torch.cuda.is_available())
        arguments = ["cpt.commands.verdict", str(run), "--batch-size", str(batch_size)]
        environment = {"PYTHONPATH": environment_alone()["PYTHONPATH"]}
        child = Child(command_of_attempt(arguments, processes, None, "-m"), environment=environment)
        exit_code, received = child.wait_for_end()
        if received:
            name = signal.Signals(received).name
            raise Interrupted(f"stopped by {name}. Again: cpt verdict {run}")
        if exit_code == 0:
            return
        print_once(
            f"warning: {processes} processes could not measure {run} (see above). One process tries again."
        )
    join_processes({"ddp_timeout": SECONDS_FOR_OTHERS})
    print_verdict(finished, batch_size=batch_size)
    leave_processes()


def print_verdict(run: Run, *, batch_size: int = 8) -> None:
    """Complete the verdict, add it to the model's card, and print it in a few lines."""
    from accelerate.utils.memory import clear_device_cache

    from cpt.checkpoints.retention import archive_record
    from cpt.evaluation.evaluate import complete_verdict
    from cpt.export.export import write_model_card

    clear_device_cache(garbage_collection=True)  # of a run that ended in this process
    verdict = complete_verdict(run, batch_size=batch_size)
    if not is_main_process():
        return
    try:
        write_model_card(run.export_folder, run.folder, run.folder.name)
    except OSError as problem:  # the model has a card without the verdict
        print_once(
            f"warning: the model's card cannot be written: {problem.strerror}. Again: cpt verdict {run.folder}"
        )
    archive_record(run.folder, saved_recipe(run.folder).checkpoints.archive)
    show(verdict, run, open_console())


def show(verdict: "Verdict", run: Run, console: Console) -> None:
    """Print the numbers as a table, what was not run, then the result and the next step, and where everything is."""
    table = Table(
        "",
        "items",
        "before",
        "after",
        "change",
        "95 % interval",
        "per byte",
        "worse",
        "result",
        box=None,
        pad_edge=False,
    )
    for of_set in sorted(verdict.sets, key=lambda of_set: of_set.is_general):
        table.add_row(*row_of_set(of_set))
    scores = [*verdict.domain_test, *verdict.tasks]
    for test in scores:
        table.add_row(*row_of_score(test))
    if table.rows:
        console.print(table)
    for test in scores:
        if test.transitions is not None:
            console.print(
                f"{test.name}, {test.metric}, by question: {test.transitions}.", markup=False
            )
    for sentence in verdict.notes():
        console.print(sentence, markup=False)
    show_data(verdict, console)
    if verdict.not_run:
        console.print(
            f"Not run: {', '.join(missing.what for missing in verdict.not_run)}; the page has the commands."
        )
    for sentence in [*verdict.findings(), verdict.next_step()]:
        console.print(sentence, markup=False, highlight=False)
    console.print(
        f"Page: {run.folder / VERDICT_PAGE}", f"Model: {run.export_folder}", sep="\n", markup=False
    )
    if verdict.serve and verdict.is_usable:
        console.print(f"Serve it: {verdict.serve}", markup=False)


def row_of_set(of_set: "SetVerdict") -> list[str]:
    kind = "general" if of_set.is_general else "domain"
    name = escape(of_set.name)
    if of_set.name != kind:
        name += f" ({kind})"
    per_byte = f"{100 * (of_set.after / of_set.before - 1):+.1f} %"
    row = [
        f"{name}, bits per byte",
        format_count(of_set.documents),
        f"{of_set.before:.4f}",
        f"{of_set.after:.4f}",
    ]
    difference = of_set.difference
    if difference is None:
        return [*row, "", "none", per_byte, "", of_set.outcome]
    worse = ""
    if difference.num_worse is not None:
        worse = f"{difference.num_worse / difference.items:.0%}"
    change = f"{difference.decides.percents[0]:+.1f} %"
    return [*row, change, signed(difference.decides), per_byte, worse, of_set.outcome]


def row_of_score(test: ScoreReport) -> list[str]:
    row = [f"{escape(test.name)}, {test.metric}", format_count(test.questions)]
    difference = test.against
    if difference is None:
        return [*row, "", f"{test.value:.3f}", "", "none", "", "", "unknown"]
    row += [
        f"{difference.before:.3f}",
        f"{test.value:.3f}",
        f"{difference.difference:+.3f}",
        f"{difference.low:+.3f} to {difference.high:+.3f}",
    ]
    outcome = difference.outcome(higher_is_better=test.higher_is_better)
    return [*row, "", "", outcome]


def show_data(verdict: "Verdict", console: Console) -> None:
    """Print what became of the training data."""
    for source in verdict.sources:
        if source.account:
            console.print(source.account, markup=False, highlight=False)
    num_dropped = sum(source.decontaminated for source in verdict.sources)
    if num_dropped:
        console.print(f"Dropped as contaminated: {num_dropped:,} training documents.")


if __name__ == "__main__":  # the main process of several continues with this program
    run_command(command)
