"""`cpt verdict RUN`: measure a finished run against its base, and write its verdict."""

from pathlib import Path
from typing import Annotated

import typer
from accelerate.utils.memory import clear_device_cache
from transformers.utils.logging import disable_progress_bar

from cpt.command_line import run_command, show_log
from cpt.distributed import tell
from cpt.errors import CheckpointError
from cpt.evaluation.evaluate import complete_verdict
from cpt.evaluation.paired import dominated
from cpt.export.export import write_model_card
from cpt.runs.folder import VERDICT_PAGE
from cpt.runs.record import Run


def command(
    run: Annotated[Path, typer.Argument(help="The folder of a finished run.")],
    batch_size: Annotated[int, typer.Option(min=1, help="Rows in one forward pass; no figure depends on it.")] = 8,
) -> None:
    """Judge a finished run, as `cpt train` does at its end: domain test and tasks against the base, contamination, one
    page.

    Example: cpt verdict runs/my-run
    """
    show_log()
    disable_progress_bar()
    finished = Run(run)
    if not run.is_dir() or not finished.is_finished:
        raise CheckpointError(f"{run} is not a finished run. Give its folder, or let it finish: cpt train RECIPE")
    judge(finished, batch_size=batch_size)


def judge(run: Run, *, batch_size: int = 8) -> None:
    """Complete the verdict, add it to the model's card, and print it in a few lines."""
    clear_device_cache(garbage_collection=True)  # of a run that ended in this process
    verdict = complete_verdict(run, batch_size=batch_size)
    try:
        write_model_card(run.export_folder, run.folder, run.folder.name)
    except OSError as problem:  # the model has a card without the verdict
        tell(f"warning: the model's card cannot be written: {problem.strerror}. Again: cpt verdict {run.folder}")
    tell(verdict.headline())
    for one in verdict.sets:
        if one.difference and one.difference.is_dominated and dominated(one.difference) not in verdict.headline():
            tell(f"  warning: `{one.name}`: {dominated(one.difference)}")
    for finding in [*verdict.domain_test, *verdict.tasks]:
        tell(f"  {finding.verdict()}")
    num_dropped = sum(source.decontaminated for source in verdict.sources)
    tell(f"  {num_dropped:,} training documents were dropped as contaminated.")
    for missing in verdict.not_run:
        tell(f"  not run: {missing.what}: {missing.why}.")
    serve = f"; serve it: {verdict.serve}" if verdict.serve else ""
    tell(f"The page: {run.folder / VERDICT_PAGE}. The model is in {run.export_folder}{serve}")


if __name__ == "__main__":  # the main process of several continues with this program
    run_command(command)
