import json
import random

import pytest

from cpt.data.readers.decontamination import EvaluationDocument
from cpt.data.readers.filters import build_components, reason_to_drop
from cpt.data.rows.build import build_data
from cpt.data.rows.contamination import find_contamination, with_decontamination
from cpt.recipe.schema import Component, Data, Evaluation, HeldOut, Source

WORDS = [f"word{number}" for number in range(5000)]


def text(seed, count=60):
    return " ".join(random.Random(seed).choices(WORDS, k=count))


@pytest.fixture
def exam(tmp_path):
    path = tmp_path / "exam.jsonl"
    path.write_text("".join(json.dumps({"text": text(number)}) + "\n" for number in range(40)))
    return Evaluation(perplexity=[HeldOut(path=str(path), name="exam")])


def test_planted_documents_are_found_by_source_and_line(source, exam, tmp_path):
    clean = source("clean", [text(number) for number in range(100, 150)])
    dirty = source(
        "dirty",
        [text(200), f"{text(201)} {text(7)} {text(202)}", text(203), f"{text(204)} {text(39, 30)}"],
        name="dirty",
    )
    found = find_contamination(Data(sources=[clean, dirty]), exam, cache_dir=tmp_path)
    places = [(hit.source, hit.where, hit.set_name, hit.evaluation_document) for hit in found.hits]
    folder = tmp_path
    assert places == [
        ("dirty", f"{folder / 'dirty.jsonl'}:2", "exam", f"{folder / 'exam.jsonl'}:8"),
        ("dirty", f"{folder / 'dirty.jsonl'}:4", "exam", f"{folder / 'exam.jsonl'}:40"),
    ]
    assert found.documents == {"clean": 50, "dirty": 4} and found.counts == {"clean": {}, "dirty": {"exam": 2}}
    assert found.num_contaminated == 2 and found.summary().startswith(
        "2 of 54 training documents hold half or more of one of 40"
    )


def test_exact_copies_of_a_held_out_set_are_counted_apart(source, exam, tmp_path):
    sources = [
        source("a", [text(200), text(7), text(201)], name="a"),
        source("b", [text(7), f"{text(8)} copied"], name="b"),
    ]
    found = find_contamination(Data(sources=sources), exam, cache_dir=tmp_path)
    assert (found.num_exact_copies, found.num_contaminated) == (2, 1)


def test_a_document_that_is_held_out_of_its_source_is_no_copy_of_itself(source, tmp_path):
    texts = [text(number) for number in range(60)]
    evaluation = Evaluation(held_out_share=0.3)
    once = find_contamination(Data(sources=[source("a", texts, name="a")]), evaluation, cache_dir=tmp_path)
    assert once.num_exact_copies == 0 and once.judged > 5
    assert once.documents == {"a": 60 - once.judged}, "held-out documents are not trained on"


def test_questions_of_tasks_are_looked_for(source, exam, tmp_path):
    data = Data(sources=[source("a", [f"the answer: {text(77)}"], name="a")])
    found = find_contamination(
        data, exam, [EvaluationDocument("quiz", "quiz: question 3", text(77))], cache_dir=tmp_path
    )
    assert [(hit.set_name, hit.evaluation_document) for hit in found.hits] == [("quiz", "quiz: question 3")]


def test_workers_find_what_one_process_finds(source, exam, tmp_path, monkeypatch):
    texts = [
        text(1000 + number, 40) + (f" {text(number % 40)} " if number % 50 == 0 else "") for number in range(2000)
    ]
    texts[701] = texts[1901] = text(3)
    data = Data(sources=[source("a", texts, name="a")])
    alone = find_contamination(data, exam, cache_dir=tmp_path)
    monkeypatch.setattr("cpt.data.rows.contamination.POOL_BYTES", 1)
    monkeypatch.setattr("cpt.data.rows.contamination.PIECE_BYTES", 200_000)
    monkeypatch.setenv("CPT_WORKERS", "2")
    assert find_contamination(data, exam, cache_dir=tmp_path) == alone and (
        alone.num_contaminated,
        alone.num_exact_copies,
    ) == (40, 2)


def view(of_text):
    return {"text": of_text, "source": "s", "where": "w"}


def data_of(*filters):
    return Data(sources=[Source(path="a.jsonl")], filters=[Component(name="length", min_characters=5), *filters])


@pytest.fixture
def exam_text(tmp_path):
    (tmp_path / "exam.txt").write_text(text(5))
    return Evaluation(perplexity=[HeldOut(path=str(tmp_path / "exam.txt"), name="exam")])


@pytest.mark.parametrize("own", [[], [Component(name="decontaminate")]], ids=["by default", "asked for"])
def test_the_recipes_own_evaluation_is_looked_for(exam_text, tmp_path, own):
    filters = with_decontamination(data_of(*own), exam_text, tmp_path / "cache").filters
    assert [component.name for component in filters] == ["length", "decontaminate"]
    built = build_components("filter", {"data.filters": filters})
    assert reason_to_drop(view(f"{text(900)} {text(5)}"), built) == "contaminated: exam"


def test_it_can_be_refused_and_is_not_there_without_evaluation(exam_text, tmp_path):
    refused = data_of(Component(name="decontaminate", own_evaluation=False))
    assert with_decontamination(refused, exam_text, tmp_path) == refused
    assert (
        reason_to_drop(view(text(5) + " copied"), build_components("filter", {"data.filters": refused.filters}))
        is None
    )
    assert with_decontamination(data_of(), Evaluation(), tmp_path) == data_of()


def test_files_of_the_users_own_stay_beside_it(exam_text, tmp_path):
    (tmp_path / "quiz.txt").write_text(text(7))
    data = data_of(Component(name="decontaminate", against=[str(tmp_path / "quiz.txt")]))
    built = build_components(
        "filter", {"data.filters": with_decontamination(data, exam_text, tmp_path / "cache").filters}
    )
    assert [reason_to_drop(view(text(n) + " copied"), built) for n in (5, 7, 8)] == [
        "contaminated: exam",
        "contaminated: quiz",
        None,
    ]


PLANTED = [text(100), f"{text(101)} {text(5)} {text(102)}", text(103), f"{text(104)} {text(5, 8)}"]


def test_documents_held_out_by_their_hash_are_looked_for_in_all_sources(tokenizer, source, tmp_path):
    first = source("first", [text(number) for number in range(60)], name="first")
    second = source("second", [f"{text(number)} copied" for number in range(60)], name="second")
    data, evaluation = Data(sources=[first, second], sequence_length=64), Evaluation(held_out_share=0.3)
    built = build_data(data, tokenizer, seed=1, evaluation=evaluation, cache_dir=tmp_path / "cache")
    assert (
        built.sources[1].dropped["contaminated: first"] + built.sources[1].documents + built.sources[1].held_out == 60
    )
    held_out_of_both = built.held_out["first"].num_documents + built.held_out["second"].num_documents
    left = [report.documents for report in built.sources]
    assert (
        held_out_of_both > 20
        and max(left) < 60 - held_out_of_both / 2
        and "contaminated: second" in built.sources[0].dropped
    )


def test_the_index_is_read_again_only_when_a_file_changed(exam_text, tmp_path, monkeypatch):
    first = with_decontamination(data_of(), exam_text, tmp_path / "cache")
    with monkeypatch.context() as patched:
        patched.setattr("cpt.data.rows.contamination.read_runs", None)
        assert with_decontamination(data_of(), exam_text, tmp_path / "cache") == first
    (tmp_path / "exam.txt").write_text(text(6, 61))
    assert with_decontamination(data_of(), exam_text, tmp_path / "cache") != first


def test_the_stored_tokens_are_found_again_by_another_cache_and_place(tokenizer, source, tmp_path):
    keys = []
    for place in ("here", "there"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "exam.txt").write_text(text(5))
        evaluation = Evaluation(perplexity=[HeldOut(path=str(tmp_path / place / "exam.txt"), name="exam")])
        data = Data(sources=[source("train", PLANTED)], sequence_length=64)
        built = build_data(data, tokenizer, seed=1, evaluation=evaluation, cache_dir=tmp_path / place / "cache")
        keys.append((built.windowed[0].tokenized.folder.name, built.fingerprint))
    assert keys[0] == keys[1]
