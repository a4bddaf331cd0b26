"""`cpt verdict RUN`: measure a finished run against its base, and write the page that tells whether it worked."""

import gc
from pathlib import Path
from typing import Annotated

import torch
import typer
from transformers.utils.logging import disable_progress_bar

from cpt.checkpoints.model_card import write_model_card
from cpt.command_line import run_command, show_log
from cpt.errors import CheckpointError
from cpt.evaluation.after_training import judge_run
from cpt.evaluation.verdict import dominated
from cpt.ranks import tell
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
        raise CheckpointError(
            f"{run} is no finished run. Name the folder of one (output_dir/name), or let it finish: cpt train RECIPE"
        )
    judge(finished, batch_size=batch_size)


def judge(run: Run, *, batch_size: int = 8) -> None:
    """Complete the verdict, put it into the model's card, and say in a few lines what it is."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # of a run that ended in this process
    verdict = judge_run(run, batch_size=batch_size)
    try:
        write_model_card(run.export_folder, run.folder, run.folder.name)
    except OSError as problem:  # the model is whole, and has a card without the verdict
        tell(f"warning: the model's card cannot be written: {problem.strerror}. Again: cpt verdict {run.folder}")
    tell(verdict.headline())
    for of_set in verdict.sets:
        if (
            of_set.difference
            and of_set.difference.is_dominated
            and dominated(of_set.difference) not in verdict.headline()
        ):
            tell(f"  warning: `{of_set.name}`: {dominated(of_set.difference)}")
    for finding in [*verdict.domain_test, *verdict.tasks]:
        tell(f"  {finding.verdict()}")
    left_out = sum(source.decontaminated for source in verdict.sources)
    tell(f"  {left_out:,} training documents were left out as contaminated.")
    for one in verdict.not_run:
        tell(f"  not run: {one.what}: {one.why}.")
    tell(
        f"The page: {run.folder / VERDICT_PAGE}. The model is in"
        f" {run.export_folder}{f'; serve it: {verdict.serve}' if verdict.serve else ''}"
    )


if __name__ == "__main__":  # the main process of several goes on with it, as a program of its own
    run_command(command)
