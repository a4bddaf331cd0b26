"""Measure a finished run for its verdict: domain test, tasks and contamination. The run itself measured its losses."""

import logging
from pathlib import Path

import torch

from cpt.data.readers.columns import ONE_A_ROW, form_of_stage, sections_of
from cpt.data.readers.decontamination import Judged
from cpt.data.readers.sources import files_with_sizes
from cpt.data.rows.contamination import Contamination, find_contamination
from cpt.data.rows.open_sources import unchecked_sources
from cpt.errors import CptError, DataError
from cpt.evaluation.domain_test import Question, domain_test
from cpt.evaluation.evaluate import EvaluationRequest, build_report, measure, model_at
from cpt.evaluation.paired import EvaluationReport
from cpt.evaluation.sets import data_of_recipe, open_evaluation_sets
from cpt.evaluation.tasks import domain_questions, task_texts, tasks_of_recipe
from cpt.evaluation.verdict import NotRun, Verdict, verdict_of_run, write_verdict
from cpt.recipe.load import load_recipe
from cpt.recipe.schema import Recipe
from cpt.runs.folder import RECIPE, VERDICT, read_object
from cpt.runs.record import Run
from cpt.tokenizer.load import load_tokenizer

log = logging.getLogger("cpt")
MOST_BYTES_SEARCHED = 500 * 2**20  # of sources; one core searches 15 to 35 MB a second


def needs_verdict(run: Run) -> bool:
    """Whether the verdict of a finished run has only the run's own losses so far."""
    page = run.folder / VERDICT
    return run.is_finished and page.is_file() and not read_object(page, []).get("is_complete", True)


def complete_verdict(run: Run, *, batch_size: int = 8) -> Verdict:
    """Measure what is missing in the verdict of a finished run, and write it again.

    It needs one process, which loads the model and then the base. A measurement that fails is listed in the verdict
    with the command that repeats it.

    Raises:
        CptError: the run's own record cannot be read.
    """
    recipe = load_recipe(run.folder / RECIPE)
    evaluation, contamination, not_run = None, None, list[NotRun]()
    try:
        evaluation, not_run = evaluate_after_training(run.folder, recipe, batch_size=batch_size)
    except (CptError, torch.OutOfMemoryError) as problem:
        not_run = [NotRun("domain test and benchmarks", f"{one_line(problem)}. Again: cpt verdict {run.folder}")]
    try:
        contamination = search_after_training(recipe)
    except CptError as problem:
        not_run.append(NotRun("contamination", f"{one_line(problem)}. Again: cpt contamination {run.folder / RECIPE}"))
    serve = f"cpt serve {run.export_folder}"
    verdict = verdict_of_run(
        run.folder, evaluation=evaluation, contamination=contamination, serve=serve, not_run=not_run, is_complete=True
    )
    write_verdict(run.folder, verdict)
    return verdict


def one_line(problem: BaseException) -> str:
    """The first line of an error, as part of a sentence."""
    return str(problem).partition("\n")[0].rstrip(".")


def evaluate_after_training(
    folder: Path, recipe: Recipe, *, batch_size: int = 8
) -> tuple[EvaluationReport | None, list[NotRun]]:
    """Domain test and tasks of the model and its base, and the reasons for missing domain tests.

    Args:
        folder: of a run whose model is exported.
        batch_size: rows in one forward pass.

    Raises:
        CptError: the model, the base or the held-out documents cannot be read.
    """
    questions, not_run = questions_of_sets(recipe)
    tasks = tasks_of_recipe(recipe.evaluation.tasks)
    if not questions and not tasks:
        return None, not_run
    asked = EvaluationRequest(made=questions, tasks=tasks, batch_size=batch_size)
    # Each with the tokenizer that lies beside it: the run's may have new words that the base does not know.
    paths = [str(folder), *([] if recipe.model.from_scratch else [str(recipe.model.path)])]
    what = [*(f"domain test of {name}" for name in questions), *(name for choice in tasks for name in choice.names)]
    log.info(f"Measuring {' and '.join(paths)}: {', '.join(what)}")
    return build_report(*(measure(model_at(path, recipe.model), asked) for path in paths)), not_run


def questions_of_sets(recipe: Recipe) -> tuple[dict[str, list[Question]], list[NotRun]]:
    """Questions about each domain set, and the reasons for missing ones."""
    evaluation = recipe.evaluation
    has_texts = (
        bool(evaluation.perplexity)
        or evaluation.held_out_share is not None
        and form_of_stage(recipe.stage) not in ONE_A_ROW
    )
    if not has_texts:
        return {}, []
    most = domain_questions(evaluation.tasks)
    if not most:
        return {}, [NotRun("domain test", "refused in `evaluation.tasks` (`questions: 0`)")]
    if recipe.model.from_scratch:
        return {}, [NotRun("domain test", "there is no base to compare with: the run began with new weights")]
    questions, not_run = dict[str, list[Question]](), []
    for name, judged in open_evaluation_sets(
        data_of_recipe(recipe), load_tokenizer(recipe.tokenizer, recipe.model)
    ).items():
        if name in evaluation.retain or judged.rows.form in ONE_A_ROW:  # of which no text is made
            continue
        try:
            questions[name] = domain_test(judged.texts(), most=most)
        except DataError as problem:
            not_run.append(NotRun(f"domain test of {name}", one_line(problem)))
    return questions, not_run


def search_after_training(recipe: Recipe) -> Contamination | None:
    """Evaluation documents and questions in the training sources; None if there is nothing to search for.

    Raises:
        DataError: the sources are too large, or are not local files.
    """
    data, evaluation = sections_of(recipe)
    choices = tasks_of_recipe(evaluation.tasks)
    if evaluation.held_out_share is None and not evaluation.perplexity and not choices:
        return None
    if elsewhere := unchecked_sources(data, evaluation):
        raise DataError(f"not all sources are files on this machine ({elsewhere[0]})")
    files = [
        pair
        for number, source in enumerate(data.sources)
        for pair in files_with_sizes(source, f"data.sources[{number}]")
    ]
    size = sum(size for _, size in files)
    if size > MOST_BYTES_SEARCHED:
        raise DataError(f"the sources have {size / 2**30:.1f} GiB, which takes a while to search")
    questions = (Judged(*question) for choice in choices for question in task_texts(choice.names, choice.folder))
    return find_contamination(data, evaluation, questions)
