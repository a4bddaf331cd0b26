import json
import random
from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from threads_as_ranks import on_ranks
from tiny import WORDS
from tiny_checkpoints import random_llama

from cpt.errors import RecipeError, UserCodeError
from cpt.evaluation.tasks import (
    TaskChoice,
    answer_together,
    check_tasks,
    run_tasks,
    task_choices,
    task_difference,
    task_texts,
    task_transitions,
    tasks_of_recipe,
)
from cpt.recipe.schema import Component

pytest.importorskip("lm_eval")
LOCAL = {"dataset_path": "json", "test_split": "test", "doc_to_text": "{{question}}"}
CHOICE = {
    **LOCAL,
    "task": "mine",
    "output_type": "multiple_choice",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "answer",
    "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
}
WRITING = {
    **LOCAL,
    "task": "writes",
    "output_type": "generate_until",
    "doc_to_target": "{{choices[0]}}",
    "generation_kwargs": {"max_gen_toks": 4, "until": ["\n"]},
    "metric_list": [{"metric": "exact_match"}],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Tasks over one local file."""
    path, draw = tmp_path_factory.mktemp("tasks"), random.Random(0)
    questions = [
        {
            "question": " ".join(draw.choices(WORDS, k=12)),
            "choices": [" ".join(draw.choices(WORDS, k=3)) for _ in range(4)],
            "answer": number % 4,
        }
        for number in range(24)
    ]
    (path / "questions.jsonl").write_text(
        "".join(json.dumps(question) + "\n" for question in questions)
    )
    data = {"dataset_kwargs": {"data_files": {"test": str(path / "questions.jsonl")}}}
    for task in (CHOICE, WRITING, {**CHOICE, "task": "unsafe", "unsafe_code": True}):
        (path / f"{task['task']}.yaml").write_text(yaml.safe_dump({**task, **data}))
    return path


@pytest.mark.heavy
def test_two_models_are_compared_question_by_question(tokenizer, folder):
    choice = TaskChoice(("mine",), folder=folder)
    (before, _), (after, normed) = (
        run_tasks(random_llama(seed), tokenizer, choice) for seed in (0, 1)
    )
    report, (low, high) = after.report, after.report.interval
    assert (report.name, report.metric, report.questions) == ("mine", "acc,none", 24)
    assert report.higher_is_better and low < report.value < high
    deviation = np.std(after.by_question, ddof=1)
    assert (low + high) / 2 == pytest.approx(report.value)
    assert high - low == pytest.approx(2 * 1.96 * deviation / 24**0.5)
    assert report.value == after.by_question.mean() and len(set(after.hashes)) == 24
    assert normed.report.metric == "acc_norm,none"
    found = task_difference(before, after)
    assert (found.before, found.after, found.items) == (before.report.value, report.value, 24)
    assert found.low < found.difference < found.high
    changes = task_transitions(before, after)
    assert (after.chance == 0.25).all() and changes.chance == 0.25
    assert (changes.won - changes.lost) / 24 == pytest.approx(found.difference)
    lost = (before.by_question == 1) & (after.by_question == 0)
    assert changes.first_lost == np.array(after.texts)[lost][:3].tolist() and after.texts[
        0
    ].endswith(tuple(WORDS))


def test_a_written_answer_is_not_guessed_and_of_a_function_the_chance_is_unknown(tokenizer, folder):
    (writes,) = run_tasks(
        random_llama(0), tokenizer, TaskChoice(("writes",), folder=folder, limit=4)
    )
    assert (writes.chance == 0).all() and task_transitions(writes, writes).chance == 0
    even, loss = run_tasks(random_llama(0), tokenizer, choice_of(questions=12))
    assert task_transitions(even, even).chance is None and task_transitions(loss, loss) is None
    halves = replace(even, by_question=even.by_question / 2 + 0.25)
    assert task_transitions(halves, halves) is None


def test_code_is_only_executed_when_allowed(tokenizer, folder):
    with pytest.raises(RecipeError, match="--allow-code"):
        run_tasks(random_llama(0), tokenizer, TaskChoice(("unsafe",), folder=folder))
    choice = TaskChoice(("unsafe",), folder=folder, allow_code=True, limit=2)
    assert run_tasks(random_llama(0), tokenizer, choice)[0].report.questions == 2


def test_the_texts_of_a_task_are_its_questions_with_their_choices(folder):
    first = json.loads((folder / "questions.jsonl").read_text().splitlines()[0])
    text = " ".join([first["question"], *first["choices"]])
    assert next(iter(task_texts(["mine"], folder))) == ("mine", "mine: question 1", text)


def test_entries_of_a_recipe_are_checked_before_the_run(folder):
    entries = [
        {"name": "mine"},
        {"name": "unsafe"},
        {"name": "unsafe", "allow_code_execution": True},
    ]
    (problem,) = check_tasks(
        [Component.model_validate({**entry, "folder": str(folder)}) for entry in entries]
    )
    assert "`evaluation.tasks[1]`" in str(problem) and "allow_code_execution" in str(problem)


# functions of the user


def board(model, tokenizer, *, questions: int = 24, kind: str = "list"):
    """Whether a model prefers one token to another, for each of some questions."""
    ids = torch.tensor([tokenizer(word)["input_ids"][:1] for word in WORDS[:questions]])
    preferred = (model(ids.to(model.device)).logits[:, -1].argmax(-1) % 2).tolist()
    scores = {
        "list": preferred,
        "number": sum(preferred) / len(preferred),
        "nan": float("nan"),
        "text": "high",
        "empty list": [],
        "table": [[1.0, 0.0]],
    }
    if kind in scores:
        return {"even": scores[kind], "loss": 2.5}
    return {"no scores": {}, "no names": [1.0, 0.0]}.get(kind)


def choice_of(**options):
    return TaskChoice((f"{__name__}:board",), options=options)


def test_a_function_scores_models_which_are_compared_question_by_question(tokenizer):
    (before, _), (after, loss) = (
        run_tasks(random_llama(seed), tokenizer, choice_of(questions=12)) for seed in (0, 1)
    )
    assert (after.report.metric, after.report.questions) == (
        "even",
        12,
    ) and after.report.higher_is_better
    assert (
        after.report.interval[0]
        <= after.report.value
        == after.by_question.mean()
        <= after.report.interval[1]
    )
    found = task_difference(before, after)
    assert (found.before, found.after, found.items) == (before.report.value, after.report.value, 12)
    assert (
        loss.by_question is None and not loss.report.higher_is_better and loss.report.value == 2.5
    )
    (number, _) = run_tasks(random_llama(1), tokenizer, choice_of(questions=12, kind="number"))
    assert number.report.value == after.report.value and task_difference(number, number) is None


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("nan", "nan"),
        ("text", "'high'"),
        ("empty list", "[] as `even`"),
        ("table", "[[1.0, 0.0]] as `even`"),
        ("nothing", "None"),
        ("no scores", "{}"),
        ("no names", "[1.0, 0.0]"),
        (None, "KeyError"),
    ],
)
def test_a_function_that_fails_or_returns_no_scores_is_named(tokenizer, kind, said):
    choice = choice_of(kind=kind) if kind else TaskChoice((f"{__name__}:failing",))
    with pytest.raises(UserCodeError, match=f"`{__name__}:") as refused:
        run_tasks(random_llama(0), tokenizer, choice)
    assert said in str(refused.value)


def test_processes_share_the_questions_and_each_gets_all_answers_in_their_order():
    """The choices of a question stay together; a process without a question answers nothing."""
    requests = [SimpleNamespace(doc_id=number // 3, name=f"{number}") for number in range(12)]
    for count in (3, 5):
        read = defaultdict(list)

        def work(rank, read=read):
            def answer(asked, disable_tqdm=False):
                read[rank] += [request.name for request in asked]
                return [f"answer {request.name} {disable_tqdm}" for request in asked]

            return answer_together(answer, requests)

        found = on_ranks(count, work)
        owners = [number // 3 % count for number in range(12)]
        expected = [f"answer {number} {owner > 0}" for number, owner in enumerate(owners)]
        assert found == [expected] * count
        for rank in range(count):
            assert read[rank] == [str(n) for n, owner in enumerate(owners) if owner == rank]


def failing(model, tokenizer):
    raise KeyError("x")


def test_options_of_a_function_are_checked_and_given_by_the_recipe_and_the_command_line():
    name = f"{__name__}:board"
    assert list(check_tasks([Component(name=name, questions=5)])) == []
    for entry in ({"name": name, "limit": 5}, {"name": f"{__name__}:bord"}):
        (problem,) = check_tasks([Component.model_validate(entry)])
        assert "`evaluation.tasks[0]" in str(problem) and "board" in str(problem)
    (of_recipe,) = tasks_of_recipe(
        [Component(name=name, questions=5), Component(name="domain_test")]
    )
    assert of_recipe.is_function and of_recipe.options == {"questions": 5}
    of_lm_eval, own = task_choices(["mine", name, "writes"], None, False, 3, None)
    assert of_lm_eval.names == ("mine", "writes") and (own.names, own.options) == (
        (name,),
        {"limit": 3},
    )
