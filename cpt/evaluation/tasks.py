"""Tasks of lm-eval-harness: our loaded model, its tasks and its scores."""

import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cpt.errors import CptError, DataError, RecipeError, ResourceError, install_line
from cpt.evaluation.paired import Difference, ScoreReport, mean_difference
from cpt.plugins import check_options, did_you_mean
from cpt.recipe.schema import Component

if TYPE_CHECKING:  # it takes seconds to import, and is an extra
    from lm_eval.tasks import TaskManager


DOMAIN_TEST = "domain_test"  # no task of lm-eval, but named among them
FEWEST_QUESTIONS = 30  # of a kind; with so many the interval of an accuracy reaches about 17 points to each side
LOWER_IS_BETTER = ("perplexity", "bits_per_byte")  # metrics that lm-eval does not always say it of


@dataclass(frozen=True)
class TaskScore:
    report: ScoreReport  # with lm-eval's name of the metric and its filter: `acc,none`
    by_question: NDArray[np.float64] | None  # None where the metric is not one of single questions
    hashes: tuple[str, ...]  # of the questions, in the same order


@dataclass(frozen=True)
class TaskChoice:
    names: tuple[str, ...]  # lm-eval's tasks, groups or tags, or those of `folder`
    folder: Path | None = None
    allow_code: bool = False
    limit: int | None = None
    num_fewshot: int | None = None


def task_of_recipe(
    name: str,
    *,
    folder: str | None = None,
    limit: int | None = None,
    num_fewshot: int | None = None,
    allow_code_execution: bool = False,
) -> TaskChoice:
    """A task, group or tag of lm-eval by its own name, or one of yours; an entry of `evaluation.tasks` has these
    options.

    Args:
        folder: YAML files of your own tasks.
        limit: only the first so many questions of each.
        num_fewshot: solved examples before each question; by default the task's.
        allow_code_execution: of code that the model writes, on this machine, with your rights.
    """
    return TaskChoice((name,), None if folder is None else Path(folder), allow_code_execution, limit, num_fewshot)


def domain_test_of_recipe(*, questions: int = 200) -> int:
    """The test that is made of the held-out documents, also without an entry.

    Args:
        questions: at most, of each kind and set; 0 turns it off.
    """
    return questions


def domain_questions(tasks: Sequence[Component]) -> int:
    options = next((task.options for task in tasks if task.name == DOMAIN_TEST), {})
    return domain_test_of_recipe(**options)


def tasks_of_recipe(tasks: Sequence[Component]) -> list[TaskChoice]:
    """The tasks of lm-eval in `evaluation.tasks`, which `check_tasks` has checked."""
    return [task_of_recipe(task.name, **task.options) for task in tasks if task.name != DOMAIN_TEST]


def check_tasks(tasks: Sequence[Component]) -> Iterator[CptError]:
    """The mistakes in `evaluation.tasks`, found by loading the data of each task."""
    for number, task in enumerate(tasks):
        key = f"evaluation.tasks[{number}]"
        try:
            if task.name == DOMAIN_TEST:
                check_options(domain_test_of_recipe, task.options, key)
                continue
            check_options(task_of_recipe, task.options, key)
            allowed_tasks(task_of_recipe(task.name, **task.options))
        except CptError as problem:
            yield type(problem)(str(problem) if key in str(problem) else f"`{key}`: {problem}")


def allowed_tasks(choice: TaskChoice) -> "tuple[TaskManager, dict[str, Any]]":
    """As `load_tasks`; RecipeError if a task executes code and may not."""
    manager, loaded = load_tasks(choice.names, choice.folder)
    # lm-eval sets the mark only on tasks that execute code.
    if not choice.allow_code and (
        unsafe := [name for name, task in loaded.items() if getattr(task, "UNSAFE_CODE", False)]
    ):
        raise RecipeError(
            f"{', '.join(unsafe)} executes the code that the model writes, on this machine and with your rights. Allow"
            " it with --allow-code (in a recipe `allow_code_execution: true`), best inside a container, or leave the"
            " task out."
        )
    return manager, loaded


def run_tasks(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, choice: TaskChoice, *, batch_size: int = 8
) -> list[TaskScore]:
    """Evaluate the model on tasks, in this process; the scores are those of lm-eval's own command."""
    manager, _ = allowed_tasks(choice)
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    if choice.allow_code:
        os.environ["HF_ALLOW_CODE_EVAL"] = "1"  # the metric asks for it a second time
    wrapped = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
    options: dict[str, Any] = {"task_manager": manager, "limit": choice.limit, "num_fewshot": choice.num_fewshot}
    options |= {"log_samples": True, "confirm_run_unsafe_code": choice.allow_code}
    found: Any = simple_evaluate(wrapped, tasks=list(choice.names), **options)
    assert found is not None, "this is the only process"
    results, subtasks, scores = found["results"], found.get("group_subtasks", {}), []
    asked = [name for name in results if name in choice.names]
    below = {task for group in asked for task in subtasks.get(group, [])}
    for name in asked or [name for name in results if name not in below]:  # a tag means its tasks
        tasks = leaves(name, subtasks)
        samples = [sample for task in tasks for sample in found["samples"].get(task, [])]
        for key, value in results[name].items():
            metric, _, chosen = key.partition(",")
            if not chosen or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            of_filter = (sample for sample in samples if sample["filter"] == chosen)
            own = [sample for sample in of_filter if isinstance(sample.get(metric), int | float)]
            error = results[name].get(f"{metric}_stderr,{chosen}")
            is_better_higher = found.get("higher_is_better", {}).get(tasks[0], {}).get(metric)
            if is_better_higher is None:
                is_better_higher = not any(word in metric for word in LOWER_IS_BETTER)
            # By lm-eval's own standard error, where it gives one.
            interval = (value - 1.96 * error, value + 1.96 * error) if isinstance(error, int | float) else None
            questions = sum(found["n-samples"][task]["effective"] for task in tasks)
            report = ScoreReport(name, key, float(value), interval, questions, bool(is_better_higher))
            by_question = np.array([float(sample[metric]) for sample in own]) if own else None
            scores.append(TaskScore(report, by_question, tuple(sample["doc_hash"] for sample in own)))
    return scores


def load_tasks(names: Sequence[str], folder: Path | None) -> "tuple[TaskManager, dict[str, Any]]":
    """lm-eval's task manager, and the tasks by name, members of groups included: RecipeError for an unknown folder or
    task, ResourceError if lm-eval or the data cannot be had, DataError if the data are not what the task expects."""
    try:
        from lm_eval.tasks import TaskManager
    except ImportError as problem:
        raise ResourceError(f"tasks need lm-eval ({problem}). Install it: {install_line('evaluation')}") from problem
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    if folder is not None and not folder.is_dir():
        raise RecipeError(
            f"there is no folder `{folder}` with tasks. Give --task-folder one that holds their YAML files."
        )
    local = None if folder is None else TaskManager(include_path=str(folder), include_defaults=False)
    if local is not None and set(names) <= set(local.all_tasks):
        manager = local
    else:  # then lm-eval's own thousands of tasks are indexed
        manager = TaskManager(include_path=None if folder is None else str(folder))
    known = manager.all_tasks
    if unknown := [name for name in names if name not in known]:
        raise RecipeError(
            f"lm-eval has no task called `{unknown[0]}`.{did_you_mean(unknown[0], known)} It lists {len(known):,}:"
            " `lm-eval ls tasks`. For tasks of your own: --task-folder FOLDER."
        )
    try:
        return manager, dict(manager.load(list(names))["tasks"])
    except (ConnectionError, FileNotFoundError) as problem:
        first = str(problem).strip().split("\n", 1)[0]
        raise ResourceError(
            f"the data of {', '.join(names)} cannot be fetched: {first} Connect to the Hub once, or use tasks of your"
            " own: --task-folder."
        ) from problem
    except ValueError as problem:
        raise DataError(
            f"{', '.join(names)}: lm-eval cannot load the data: {problem} Check the task's YAML file."
        ) from problem


def leaves(name: str, subtasks: dict[str, list[str]]) -> list[str]:
    """The tasks of a group and of groups in it; a task itself."""
    return [task for below in subtasks[name] for task in leaves(below, subtasks)] if subtasks.get(name) else [name]


def task_difference(before: TaskScore, after: TaskScore) -> Difference | None:
    """The difference on the same questions; None if the metric has no score for each question."""
    if before.by_question is None or after.by_question is None or len(after.hashes) < 2:
        return None
    return mean_difference(before.by_question, after.by_question) if before.hashes == after.hashes else None


def task_texts(names: Sequence[str], folder: Path | None = None) -> Iterator[tuple[str, str, str]]:
    """(task, place, text) of each question with its choices or answer, to search training documents for."""
    for name, task in load_tasks(names, folder)[1].items():
        for number, document in enumerate(task.eval_docs, 1):
            has_choices = task.config.doc_to_choice is not None
            choices = task.doc_to_choice(document) if has_choices else [task.doc_to_target(document)]
            question = task.doc_to_text(document)
            # A number is the place of the choice that fills the gap; then the choices have the text.
            text = " ".join(str(part) for part in [question, *choices] if not isinstance(part, int))
            yield name, f"{name}: question {number}", text
