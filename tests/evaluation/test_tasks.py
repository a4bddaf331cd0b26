import json
import os
import random
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from threads_as_ranks import on_ranks
from tiny import WORDS
from tiny_checkpoints import random_llama

from cpt.errors import DataError, RecipeError, ResourceError, UserCodeError
from cpt.evaluation.reports import ScoreReport
from cpt.evaluation.tasks import (
    TaskChoice,
    TaskScore,
    answer_together,
    check_tasks,
    domain_questions,
    load_tasks,
    read_scores,
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
    tagged = {**CHOICE, "task": "tagged", "tag": "exams"}
    for task in (CHOICE, WRITING, tagged, {**CHOICE, "task": "unsafe", "unsafe_code": True}):
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


def test_code_is_only_executed_when_allowed(tokenizer, folder, monkeypatch):
    """lm-eval's metrics of code ask the environment, too."""
    monkeypatch.setenv("HF_ALLOW_CODE_EVAL", "0")
    with pytest.raises(RecipeError, match="--allow-code"):
        run_tasks(random_llama(0), tokenizer, TaskChoice(("unsafe",), folder=folder))
    run_tasks(random_llama(0), tokenizer, TaskChoice(("mine",), folder=folder, limit=2))
    assert os.environ["HF_ALLOW_CODE_EVAL"] == "0"
    choice = TaskChoice(("unsafe",), folder=folder, allow_code=True, limit=2)
    assert run_tasks(random_llama(0), tokenizer, choice)[0].report.questions == 2
    assert os.environ["HF_ALLOW_CODE_EVAL"] == "1"


def test_a_tag_is_reported_by_its_tasks(tokenizer, folder):
    scores = run_tasks(
        random_llama(0), tokenizer, TaskChoice(("exams",), folder=folder, limit=3), batch_size=2
    )
    reports = [(one.report.name, one.report.metric, one.report.questions) for one in scores]
    assert reports == [("tagged", "acc,none", 3), ("tagged", "acc_norm,none", 3)]


def sample(doc_hash, num_choices, *, of="none", **metrics):
    requests = [[f"{'long ' * 40}{doc_hash}?", choice] for choice in range(num_choices)]
    return {"doc_hash": doc_hash, "filter": of, "arguments": requests, **metrics}


def test_results_of_a_group_are_those_of_its_tasks():
    """As lm-eval 0.4 returns them; the numbers of the questions are unequal."""
    evaluated = {
        "results": {
            "exams": {
                "acc,none": 0.5,
                "acc_stderr,none": 0.1,
                "perplexity,none": 3.0,
                "perplexity_stderr,none": "N/A",
                "exact_match,strict": 0.25,
                "alias": "exams",
            }
        },
        "group_subtasks": {"exams": ["maths", "prose"], "prose": ["law", "news"]},
        "configs": {
            "maths": {"output_type": "multiple_choice"},
            "law": {"output_type": "loglikelihood"},
            "news": {"output_type": "loglikelihood_rolling"},
        },
        "samples": {
            "maths": [sample("m", 4, acc=1.0), sample("n", 10, acc=0.0, acc_mutual_info=1.0)],
            "law": [sample("l", 1, acc=1.0, perplexity=2.0), sample("s", 1, of="strict")],
            "news": [sample("w", 1, perplexity=4.0)],
        },
        "n-samples": {"maths": {"effective": 2}, "law": {"effective": 3}, "news": {"effective": 5}},
        "higher_is_better": {"maths": {"exact_match": False}},
    }
    acc, perplexity, match = read_scores(evaluated, "exams")
    interval = pytest.approx((0.5 - 0.196, 0.5 + 0.196))
    assert acc.report == ScoreReport("exams", "acc,none", 0.5, interval, 10, True)
    assert perplexity.report == ScoreReport("exams", "perplexity,none", 3.0, None, 10, False)
    assert match.report == ScoreReport("exams", "exact_match,strict", 0.25, None, 10, False)
    assert (acc.by_question.tolist(), acc.hashes) == ([1.0, 0.0, 1.0], ("m", "n", "l"))
    assert acc.chance.tolist() == [1 / 4, 2 / 10, 0.0]
    assert acc.texts[0] == f"{'long ' * 40}m?"[-160:]
    assert (perplexity.by_question.tolist(), perplexity.chance) == ([2.0, 4.0], None)
    assert (match.by_question, match.hashes) == (None, ())


def test_scores_are_compared_only_on_the_same_questions():
    report = ScoreReport("exam", "f1", 0.5, None, 2)
    two = TaskScore(report, np.array([0.25, 0.5]), ("a", "b"))
    found = task_difference(two, replace(two, by_question=np.array([0.5, 1.0])))
    assert (found.before, found.after, found.difference, found.items) == (0.375, 0.75, 0.375, 2)
    assert found.negligible == pytest.approx(0.02 * 0.375)
    right = replace(two, by_question=np.array([0.0, 1.0]))
    assert task_transitions(right, right).won == 0
    others = (replace(two, hashes=("a", "c")), replace(two, by_question=None))
    for other in others:
        assert task_difference(two, other) is None and task_difference(other, two) is None
    for other in (replace(right, hashes=("a", "c")), replace(right, by_question=None)):
        assert task_transitions(right, other) is None and task_transitions(other, right) is None
    one = TaskScore(report, np.array([0.25]), ("a",))
    assert task_difference(one, one) is None


@pytest.mark.parametrize(
    ("name", "problem", "error", "said"),
    [
        ("near", None, None, None),
        ("far", None, None, None),
        ("neer", None, RecipeError, "no task `neer`"),
        (
            "near",
            ConnectionError("offline\nat x"),
            ResourceError,
            "near cannot be fetched: offline ",
        ),
        ("near", FileNotFoundError("no file"), ResourceError, "no file"),
        ("near", ValueError("a column is missing"), DataError, "a column is missing"),
    ],
)
def test_lm_evals_own_tasks_are_indexed_only_if_the_folder_lacks_one(
    tmp_path, monkeypatch, name, problem, error, said
):
    indexed = []

    class Manager:
        def __init__(self, include_path, include_defaults=True):
            indexed.append((include_path, include_defaults))
            self.all_tasks = ["near", "far"] if include_defaults else ["near"]

        def load(self, names):
            if problem is not None:
                raise problem
            return {"tasks": dict.fromkeys(names, "task")}

    monkeypatch.setattr("lm_eval.tasks.TaskManager", Manager)
    if error is not None:
        with pytest.raises(error, match=said):
            load_tasks([name], tmp_path)
    else:
        assert load_tasks([name], tmp_path)[1] == {name: "task"}
    of_folder = (str(tmp_path), False)
    assert indexed == ([of_folder] if name == "near" else [of_folder, (str(tmp_path), True)])
    with pytest.raises(RecipeError, match="`.*/gone` does not exist"):
        load_tasks([name], tmp_path / "gone")
    indexed.clear()
    if error is None:
        load_tasks([name], None)
        assert indexed == [(None, True)]


def test_the_texts_of_a_task_are_its_questions_with_their_choices(folder):
    rows = [json.loads(line) for line in (folder / "questions.jsonl").read_text().splitlines()]
    texts = [" ".join([row["question"], *row["choices"]]) for row in rows]
    written = [f"{row['question']} {row['choices'][0]}" for row in rows]
    for task, expected in (("mine", texts), ("writes", written)):
        places = [f"{task}: question {number}" for number in range(1, 25)]
        assert list(task_texts([task], folder)) == [
            (task, place, text) for place, text in zip(places, expected, strict=True)
        ]


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
    return {"no scores": {}, "no names": [1.0, 0.0], "numbered": {5: 0.5}}.get(kind)


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
    (numbered,) = run_tasks(random_llama(1), tokenizer, choice_of(questions=12, kind="numbered"))
    assert (numbered.report.metric, numbered.report.higher_is_better) == ("5", True)
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
    names = ["mine", name, "writes"]
    of_lm_eval, own = task_choices(names, Path("tasks"), True, 3, None)
    assert of_lm_eval == TaskChoice(("mine", "writes"), Path("tasks"), True, 3, None)
    assert own == TaskChoice((name,), options={"limit": 3})
    assert task_choices([name], None, False, None, 5) == [
        TaskChoice((name,), options={"num_fewshot": 5})
    ]


def test_an_entry_of_a_recipe_has_the_options_of_its_task():
    entry = {"name": "exam", "folder": "mine", "limit": 3, "num_fewshot": 5}
    plain, given = tasks_of_recipe(
        [Component(name="quiz"), Component(**entry, allow_code_execution=True)]
    )
    assert plain == TaskChoice(("quiz",), None, allow_code=False, limit=None, num_fewshot=None)
    assert given == TaskChoice(("exam",), Path("mine"), allow_code=True, limit=3, num_fewshot=5)
    assert domain_questions([]) == 200
    assert (
        domain_questions([Component(name="quiz"), Component(name="domain_test", questions=7)]) == 7
    )
