"""Run tasks of lm-eval-harness, and functions of the user, on a loaded model, and read their scores."""

import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cpt.distributed import has_process_group
from cpt.errors import CptError, DataError, RecipeError, ResourceError, UserCodeError, install_line
from cpt.evaluation.paired import (
    NORMAL_QUANTILE,
    Difference,
    Transitions,
    mean_difference,
    transitions,
)
from cpt.evaluation.reports import ScoreReport
from cpt.plugins import check_options, did_you_mean, find
from cpt.recipe.paths import is_function
from cpt.recipe.rules import DOMAIN_TEST
from cpt.recipe.schema import Component

if TYPE_CHECKING:  # slow to import, and optional
    from lm_eval.tasks import TaskManager


FEWEST_QUESTIONS = 30  # per kind: the interval of an accuracy is then about +-17 points
LONGEST_QUESTION = 160  # characters of a question that are shown, from its end
# lm-eval does not always mark these metrics.
LOWER_IS_BETTER = ("perplexity", "bits_per_byte", "loss", "error")


@dataclass(frozen=True)
class TaskScore:
    report: ScoreReport
    """With lm-eval's name of the metric and its filter: `acc,none`."""
    by_question: NDArray[np.float64] | None
    """None if the metric has no score per question."""
    hashes: tuple[str, ...]
    """The hashes of the questions, in the same order."""
    chance: NDArray[np.float64] | None = None
    """Probability that a guess is right, by question; None if unknown."""
    texts: tuple[str, ...] = ()
    """Ends of the questions."""


@dataclass(frozen=True)
class TaskChoice:
    names: tuple[str, ...]
    """Tasks, groups or tags of lm-eval or of `folder`; or one function."""
    folder: Path | None = None
    allow_code: bool = False
    limit: int | None = None
    num_fewshot: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of a task that is a function."""

    @property
    def is_function(self) -> bool:
        return is_function(self.names[0])


def task_of_recipe(
    name: str,
    *,
    folder: str | None = None,
    limit: int | None = None,
    num_fewshot: int | None = None,
    allow_code_execution: bool = False,
) -> TaskChoice:
    """A task, group or tag of lm-eval by name, or a task of `folder`; an entry of `evaluation.tasks` has these
    options.

    Args:
        folder: folder with YAML files of further tasks.
        limit: evaluate only this many questions of each task.
        num_fewshot: solved examples before each question; default: that of the task.
        allow_code_execution: run code that the model writes, on this machine, with your rights.
    """
    return TaskChoice(
        names=(name,),
        folder=None if folder is None else Path(folder),
        allow_code=allow_code_execution,
        limit=limit,
        num_fewshot=num_fewshot,
    )


def domain_test_of_recipe(*, questions: int = 200) -> int:
    """The test made from the held-out documents, which runs even without an entry.

    Args:
        questions: maximum number for each kind and set; 0 turns it off.
    """
    return questions


def domain_questions(tasks: Sequence[Component]) -> int:
    options = next((task.options for task in tasks if task.name == DOMAIN_TEST), {})
    return domain_test_of_recipe(**options)


def tasks_of_recipe(tasks: Sequence[Component]) -> list[TaskChoice]:
    """The tasks in `evaluation.tasks`, already checked by `check_tasks`."""
    of_lm_eval = []
    functions = []
    for task in tasks:
        if is_function(task.name):
            functions.append(TaskChoice((task.name,), options=task.options))
        elif task.name != DOMAIN_TEST:
            of_lm_eval.append(task_of_recipe(task.name, **task.options))
    return of_lm_eval + functions


def task_choices(
    names: Sequence[str],
    folder: Path | None,
    allow_code: bool,
    limit: int | None,
    num_fewshot: int | None,
) -> list[TaskChoice]:
    """The tasks of the command line: those of lm-eval together, and each function with the options that are set."""
    choices = []
    of_lm_eval = tuple(name for name in names if not is_function(name))
    if of_lm_eval:
        choices.append(TaskChoice(of_lm_eval, folder, allow_code, limit, num_fewshot))
    options = {}
    if limit is not None:
        options["limit"] = limit
    if num_fewshot is not None:
        options["num_fewshot"] = num_fewshot
    return choices + [TaskChoice((name,), options=options) for name in names if is_function(name)]


def check_tasks(tasks: Sequence[Component]) -> Iterator[CptError]:
    """Yield the errors in `evaluation.tasks`, found by loading the data of each task."""
    for index, task in enumerate(tasks):
        key = f"evaluation.tasks[{index}]"
        try:
            check_task(task, key)
        except CptError as problem:
            text = str(problem)
            if key not in text:
                text = f"`{key}`: {text}"
            yield type(problem)(text)


def check_task(task: Component, key: str) -> None:
    if task.name == DOMAIN_TEST:
        check_options(domain_test_of_recipe, task.options, key)
    elif is_function(task.name):
        check_options(find("evaluation", task.name, {}), task.options, key)
    else:
        check_options(task_of_recipe, task.options, key)
        allowed_tasks(task_of_recipe(task.name, **task.options))


def allowed_tasks(choice: TaskChoice) -> "tuple[TaskManager, dict[str, Any]]":
    """Like `load_tasks`; raises RecipeError if a task executes code without permission."""
    manager, tasks = load_tasks(choice.names, choice.folder)
    if choice.allow_code:
        return manager, tasks
    # lm-eval sets this flag only on tasks that execute code.
    unsafe = [name for name, task in tasks.items() if getattr(task, "UNSAFE_CODE", False)]
    if unsafe:
        raise RecipeError(
            f"{', '.join(unsafe)} executes code written by the model, on this machine and with your rights. Allow"
            " it with --allow-code (in a recipe `allow_code_execution: true`), best inside a container, or remove the"
            " task."
        )
    return manager, tasks


def run_tasks(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    choice: TaskChoice,
    *,
    batch_size: int = 8,
) -> list[TaskScore]:
    """Evaluate the model on tasks; the scores equal those of the `lm-eval` command. Several processes split lm-eval's
    requests, and the main process returns the scores; each of them calls functions of the user."""
    if choice.is_function:
        return run_function(model, tokenizer, choice.names[0], choice.options)
    manager, _ = allowed_tasks(choice)
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    if choice.allow_code:
        os.environ["HF_ALLOW_CODE_EVAL"] = "1"  # the metric needs this permission, too
    wrapped = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
    for kind in ("loglikelihood", "loglikelihood_rolling", "generate_until"):
        setattr(wrapped, kind, partial(answer_together, getattr(wrapped, kind)))
    evaluated: Any = simple_evaluate(
        wrapped,
        tasks=list(choice.names),
        task_manager=manager,
        limit=choice.limit,
        num_fewshot=choice.num_fewshot,
        log_samples=True,
        confirm_run_unsafe_code=choice.allow_code,
    )
    if evaluated is None:  # lm-eval returns results to a machine's first process
        return []
    names = [name for name in evaluated["results"] if name in choice.names]
    if not names:  # a tag expands to its tasks
        names = list(evaluated["results"])
    scores: list[TaskScore] = []
    for name in names:
        scores += read_scores(evaluated, name)
    return scores


def read_scores(evaluated: dict[str, Any], name: str) -> Iterator[TaskScore]:
    """Yield the score of each metric of a task or group from lm-eval's results."""
    tasks = leaves(name, evaluated.get("group_subtasks", {}))
    samples = []
    for task in tasks:
        kind = evaluated["configs"].get(task, {}).get("output_type")
        samples += [{**sample, "type": kind} for sample in evaluated["samples"].get(task, [])]
    results = evaluated["results"][name]
    for key, value in results.items():
        metric, _, filter_name = key.partition(",")
        if not filter_name or metric.endswith("_stderr") or not isinstance(value, int | float):
            continue
        interval = None
        error = results.get(f"{metric}_stderr,{filter_name}")
        if isinstance(error, int | float):  # lm-eval does not report one for each metric
            interval = (value - 1.96 * error, value + 1.96 * error)
        is_better_higher = evaluated.get("higher_is_better", {}).get(tasks[0], {}).get(metric)
        if is_better_higher is None:
            is_better_higher = not any(word in metric for word in LOWER_IS_BETTER)
        report = ScoreReport(
            name=name,
            metric=key,
            value=float(value),
            interval=interval,
            questions=sum(evaluated["n-samples"][task]["effective"] for task in tasks),
            higher_is_better=bool(is_better_higher),
        )
        of_filter = [sample for sample in samples if sample["filter"] == filter_name]
        yield score_by_question(report, metric, of_filter)


def score_by_question(
    report: ScoreReport, metric: str, samples: Sequence[Mapping[str, Any]]
) -> TaskScore:
    """Add the score of each question from lm-eval's samples that have this metric."""
    samples = [sample for sample in samples if isinstance(sample.get(metric), int | float)]
    chance = np.array(list(map(chance_of, samples)))
    return TaskScore(
        report,
        by_question=np.array([float(sample[metric]) for sample in samples]) if samples else None,
        hashes=tuple(sample["doc_hash"] for sample in samples),
        chance=None if np.isnan(chance).any() else chance,
        texts=tuple(str(sample["arguments"][0][0])[-LONGEST_QUESTION:] for sample in samples),
    )


def chance_of(sample: Mapping[str, Any]) -> float:
    """The probability that a guess answers a question of lm-eval; NaN if it is unknown."""
    if sample["type"] == "multiple_choice":
        num_requests = len(sample["arguments"])
        # Mutual information also asks for each choice without the question.
        return (2 if "acc_mutual_info" in sample else 1) / num_requests
    if sample["type"] in ("generate_until", "loglikelihood"):
        return 0.0
    return math.nan


def answer_together(
    answer: Callable[..., list[Any]], requests: Sequence[Any], **options: Any
) -> list[Any]:
    """The answers to lm-eval's requests, in their order: each process answers those of some questions."""
    if not has_process_group():
        return answer(requests, **options)
    rank = dist.get_rank()
    num_processes = dist.get_world_size()
    # The choices of a question stay together.
    owners = [request.doc_id % num_processes for request in requests]
    own_requests = []
    for request, owner in zip(requests, owners, strict=True):
        if owner == rank:
            own_requests.append(request)
    own_answers = answer(own_requests, disable_tqdm=rank > 0) if own_requests else []
    by_process: list[Any] = [None] * num_processes
    dist.all_gather_object(by_process, own_answers)
    answers = list(map(iter, by_process))
    return [next(answers[owner]) for owner in owners]


def run_function(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    name: str,
    options: Mapping[str, Any],
) -> list[TaskScore]:
    """Call the user's `f(model, tokenizer, *, ...)`, which returns for each metric a number, or one per question."""
    function = find("evaluation", name, {})
    check_options(function, options, name)
    with torch.no_grad():
        returned = function(model, tokenizer, **options)
    expected = "a finite number for each metric, or a list of one for each question: {'accuracy': [1, 0, 1]}"
    if not isinstance(returned, Mapping) or not returned:
        raise UserCodeError(f"the evaluation `{name}` returned {returned!r}: expected {expected}.")
    scores = []
    for metric, figure in returned.items():
        try:
            values = np.asarray(figure, np.float64)
        except (TypeError, ValueError):
            values = np.empty(0)
        if values.ndim > 1 or not values.size or not np.isfinite(values).all():
            raise UserCodeError(
                f"the evaluation `{name}` returned {figure!r} as `{metric}`: expected {expected}."
            )
        has_questions = values.ndim == 1
        num_questions = values.size if has_questions else 0
        mean = float(values.mean())
        interval = None
        if num_questions > 1:
            reach = NORMAL_QUANTILE * float(values.std(ddof=1)) / math.sqrt(num_questions)
            interval = (mean - reach, mean + reach)
        report = ScoreReport(
            name=name,
            metric=str(metric),
            value=mean,
            interval=interval,
            questions=num_questions,
            higher_is_better=not any(word in str(metric) for word in LOWER_IS_BETTER),
        )
        by_question = values if has_questions else None
        scores.append(TaskScore(report, by_question, tuple(map(str, range(num_questions)))))
    return scores


def load_tasks(names: Sequence[str], folder: Path | None) -> "tuple[TaskManager, dict[str, Any]]":
    """lm-eval's task manager, and the tasks by name, including members of groups. Raises RecipeError for an unknown
    folder or task, ResourceError without lm-eval or the data, DataError if the data do not match the task."""
    try:
        from lm_eval.tasks import TaskManager
    except ImportError as problem:
        raise ResourceError(
            f"tasks need lm-eval ({problem}). Install it: {install_line('evaluation')}"
        ) from problem
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    if folder is not None and not folder.is_dir():
        raise RecipeError(
            f"the task folder `{folder}` does not exist. Set --task-folder to a folder with YAML files of tasks."
        )
    include_path = None if folder is None else str(folder)
    # Index lm-eval's thousands of tasks only if the folder lacks one of the names.
    manager = TaskManager(include_path=include_path, include_defaults=folder is None)
    if folder is not None and not set(names) <= set(manager.all_tasks):
        manager = TaskManager(include_path=include_path)
    all_tasks = manager.all_tasks
    for name in names:
        if name not in all_tasks:
            raise RecipeError(
                f"lm-eval has no task `{name}`.{did_you_mean(name, all_tasks)} To list all {len(all_tasks):,}:"
                " `lm-eval ls tasks`. For tasks in local YAML files: --task-folder FOLDER."
            )
    try:
        return manager, dict(manager.load(list(names))["tasks"])
    except (ConnectionError, FileNotFoundError) as problem:
        first = str(problem).strip().split("\n", 1)[0]
        raise ResourceError(
            f"the data of {', '.join(names)} cannot be fetched: {first} Connect to the Hub once, or use local"
            " tasks: --task-folder."
        ) from problem
    except ValueError as problem:
        raise DataError(
            f"{', '.join(names)}: lm-eval cannot load the data: {problem} Check the task's YAML file."
        ) from problem


def leaves(name: str, subtasks: dict[str, list[str]]) -> list[str]:
    """The tasks of a group and of its subgroups; for a task, the task itself."""
    if subtasks.get(name):
        names = []
        for member in subtasks[name]:
            names += leaves(member, subtasks)
        return names
    return [name]


def task_difference(before: TaskScore, after: TaskScore) -> Difference | None:
    """The difference on the same questions; None if the metric lacks scores per question."""
    if before.by_question is None or after.by_question is None or len(after.hashes) < 2:
        return None
    if before.hashes == after.hashes:
        return mean_difference(before.by_question, after.by_question)
    return None


def task_transitions(before: TaskScore, after: TaskScore) -> Transitions | None:
    """None unless both have a score of 0 or 1 for each question."""
    old = before.by_question
    new = after.by_question
    if old is None or new is None or before.hashes != after.hashes:
        return None
    if not np.isin((old, new), (0, 1)).all():
        return None
    return transitions(old.astype(bool), new.astype(bool), after.chance, after.texts)


def task_texts(names: Sequence[str], folder: Path | None = None) -> Iterator[tuple[str, str, str]]:
    """(task, place, text) of each question with its choices or answer, to search training documents for."""
    _, tasks = load_tasks(names, folder)
    for name, task in tasks.items():
        for number, document in enumerate(task.eval_docs, 1):
            if task.config.doc_to_choice is not None:
                answers = task.doc_to_choice(document)
            else:
                answers = [task.doc_to_target(document)]
            parts = [task.doc_to_text(document), *answers]
            # A number is the index of the choice that fills the gap; then the choices contain the text.
            text = " ".join(str(part) for part in parts if not isinstance(part, int))
            yield name, f"{name}: question {number}", text
