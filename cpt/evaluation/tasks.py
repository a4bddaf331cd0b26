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
LOWER_IS_BETTER = (
    "perplexity",
    "bits_per_byte",
    "loss",
    "error",
)  # lm-eval does not always mark these metrics


@dataclass(frozen=True)
class TaskScore:
    report: ScoreReport  # with lm-eval's name of the metric and its filter: `acc,none`
    by_question: NDArray[np.float64] | None  # None if the metric has no score per question
    hashes: tuple[str, ...]  # hashes of the questions, in the same order
    chance: NDArray[np.float64] | None = (
        None  # probability that a guess is right, by question; None if unknown
    )
    texts: tuple[str, ...] = ()  # ends of the questions


@dataclass(frozen=True)
class TaskChoice:
    names: tuple[str, ...]  # tasks, groups or tags of lm-eval or of `folder`; or one function
    folder: Path | None = None
    allow_code: bool = False
    limit: int | None = None
    num_fewshot: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)  # of a function

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
        (name,), None if folder is None else Path(folder), allow_code_execution, limit, num_fewshot
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
    chosen = [(task.name, task.options) for task in tasks if task.name != DOMAIN_TEST]
    functions = [
        TaskChoice((name,), options=options) for name, options in chosen if is_function(name)
    ]
    return [
        task_of_recipe(name, **options) for name, options in chosen if not is_function(name)
    ] + functions


def task_choices(
    names: Sequence[str],
    folder: Path | None,
    allow_code: bool,
    limit: int | None,
    num_fewshot: int | None,
) -> list[TaskChoice]:
    """The tasks of the command line: those of lm-eval together, and each function with the options that are set."""
    of_lm_eval = tuple(name for name in names if not is_function(name))
    options = {
        key: value
        for key, value in {"limit": limit, "num_fewshot": num_fewshot}.items()
        if value is not None
    }
    choices = [TaskChoice((name,), options=options) for name in names if is_function(name)]
    return [TaskChoice(of_lm_eval, folder, allow_code, limit, num_fewshot)] * bool(
        of_lm_eval
    ) + choices


def check_tasks(tasks: Sequence[Component]) -> Iterator[CptError]:
    """Yield the errors in `evaluation.tasks`, found by loading the data of each task."""
    for number, task in enumerate(tasks):
        key = f"evaluation.tasks[{number}]"
        try:
            if task.name == DOMAIN_TEST:
                check_options(domain_test_of_recipe, task.options, key)
                continue
            function = (
                find("evaluation", task.name, {}) if is_function(task.name) else task_of_recipe
            )
            check_options(function, task.options, key)
            if function is task_of_recipe:
                allowed_tasks(task_of_recipe(task.name, **task.options))
        except CptError as problem:
            yield type(problem)(str(problem) if key in str(problem) else f"`{key}`: {problem}")


def allowed_tasks(choice: TaskChoice) -> "tuple[TaskManager, dict[str, Any]]":
    """Like `load_tasks`; raises RecipeError if a task executes code without permission."""
    manager, loaded = load_tasks(choice.names, choice.folder)
    # lm-eval sets this flag only on tasks that execute code.
    if not choice.allow_code and (
        unsafe := [name for name, task in loaded.items() if getattr(task, "UNSAFE_CODE", False)]
    ):
        raise RecipeError(
            f"{', '.join(unsafe)} executes code written by the model, on this machine and with your rights. Allow"
            " it with --allow-code (in a recipe `allow_code_execution: true`), best inside a container, or remove the"
            " task."
        )
    return manager, loaded


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
    options: dict[str, Any] = {
        "task_manager": manager,
        "limit": choice.limit,
        "num_fewshot": choice.num_fewshot,
    }
    options |= {"log_samples": True, "confirm_run_unsafe_code": choice.allow_code}
    found: Any = simple_evaluate(wrapped, tasks=list(choice.names), **options)
    if found is None:  # lm-eval returns results to a machine's first process
        return []
    results = found["results"]
    subtasks = found.get("group_subtasks", {})
    scores = []
    asked = [name for name in results if name in choice.names]
    below = {task for group in asked for task in subtasks.get(group, [])}
    for name in asked or [
        name for name in results if name not in below
    ]:  # a tag expands to its tasks
        tasks = leaves(name, subtasks)
        kinds = {task: found["configs"].get(task, {}).get("output_type") for task in tasks}
        samples = [
            {**one, "type": kinds[task]} for task in tasks for one in found["samples"].get(task, [])
        ]
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
            # From lm-eval's standard error, if it reports one.
            interval = (
                (value - 1.96 * error, value + 1.96 * error)
                if isinstance(error, int | float)
                else None
            )
            questions = sum(found["n-samples"][task]["effective"] for task in tasks)
            report = ScoreReport(
                name, key, float(value), interval, questions, bool(is_better_higher)
            )
            by_question = np.array([float(sample[metric]) for sample in own]) if own else None
            hashes = tuple(sample["doc_hash"] for sample in own)
            chance = np.array([chance_of(one) for one in own])
            texts = tuple(str(sample["arguments"][0][0])[-LONGEST_QUESTION:] for sample in own)
            scores.append(
                TaskScore(
                    report, by_question, hashes, None if np.isnan(chance).any() else chance, texts
                )
            )
    return scores


def chance_of(sample: Mapping[str, Any]) -> float:
    """The probability that a guess answers a question of lm-eval; NaN if it is unknown."""
    if (
        sample["type"] == "multiple_choice"
    ):  # mutual information also asks for each choice without the question
        return (2 if "acc_mutual_info" in sample else 1) / len(sample["arguments"])
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
    owners = [
        request.doc_id % num_processes for request in requests
    ]  # the choices of a question stay together
    mine = [request for owner, request in zip(owners, requests, strict=True) if owner == rank]
    everyone: list[Any] = [None] * num_processes
    dist.all_gather_object(everyone, answer(mine, disable_tqdm=rank > 0) if mine else [])
    answers = list(map(iter, everyone))
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
        found = function(model, tokenizer, **options)
    expected = "a finite number for each metric, or a list of one for each question: {'accuracy': [1, 0, 1]}"
    if not isinstance(found, Mapping) or not found:
        raise UserCodeError(f"the evaluation `{name}` returned {found!r}: expected {expected}.")
    scores = []
    for metric, value in found.items():
        try:
            values = np.asarray(value, np.float64)
        except (TypeError, ValueError):
            values = np.empty(0)
        if values.ndim > 1 or not values.size or not np.isfinite(values).all():
            raise UserCodeError(
                f"the evaluation `{name}` returned {value!r} as `{metric}`: expected {expected}."
            )
        by_question = values if values.ndim else None
        questions = values.size if values.ndim else 0
        interval = None
        if questions > 1:
            reach = NORMAL_QUANTILE * float(values.std(ddof=1)) / math.sqrt(questions)
            interval = (float(values.mean()) - reach, float(values.mean()) + reach)
        is_better_higher = not any(word in metric for word in LOWER_IS_BETTER)
        report = ScoreReport(
            name, str(metric), float(values.mean()), interval, questions, is_better_higher
        )
        scores.append(TaskScore(report, by_question, tuple(map(str, range(questions)))))
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
    local = (
        None if folder is None else TaskManager(include_path=str(folder), include_defaults=False)
    )
    if local is not None and set(names) <= set(local.all_tasks):
        manager = local
    else:  # index lm-eval's thousands of tasks
        manager = TaskManager(include_path=None if folder is None else str(folder))
    known = manager.all_tasks
    unknown = [name for name in names if name not in known]
    if unknown:
        raise RecipeError(
            f"lm-eval has no task `{unknown[0]}`.{did_you_mean(unknown[0], known)} To list all {len(known):,}:"
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
        return [task for below in subtasks[name] for task in leaves(below, subtasks)]
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
    if (
        old is None
        or new is None
        or before.hashes != after.hashes
        or not np.isin((old, new), (0, 1)).all()
    ):
        return None
    return transitions(old.astype(bool), new.astype(bool), after.chance, after.texts)


def task_texts(names: Sequence[str], folder: Path | None = None) -> Iterator[tuple[str, str, str]]:
    """(task, place, text) of each question with its choices or answer, to search training documents for."""
    for name, task in load_tasks(names, folder)[1].items():
        for number, document in enumerate(task.eval_docs, 1):
            has_choices = task.config.doc_to_choice is not None
            choices = (
                task.doc_to_choice(document) if has_choices else [task.doc_to_target(document)]
            )
            question = task.doc_to_text(document)
            # A number is the index of the choice that fills the gap; then the choices contain the text.
            text = " ".join(str(part) for part in [question, *choices] if not isinstance(part, int))
            yield name, f"{name}: question {number}", text
