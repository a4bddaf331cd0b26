import json
import random

import pytest

from cpt.data.contamination import find_contamination
from cpt.data.decontamination import Judged
from cpt.errors import DataError
from cpt.recipe.schema import Component, Data, Evaluation, HeldOut

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
    dirty = source("dirty", [text(200), f"{text(201)} {text(7)} {text(202)}", text(203), f"{text(204)} {text(39, 30)}"], name="dirty")
    found = find_contamination(Data(sources=[clean, dirty]), exam, cache_dir=tmp_path)
    places = [(hit.source, hit.where, hit.set_name, hit.evaluation_document) for hit in found.hits]
    folder = tmp_path
    assert places == [
        ("dirty", f"{folder / 'dirty.jsonl'}:2", "exam", f"{folder / 'exam.jsonl'}:8"),
        ("dirty", f"{folder / 'dirty.jsonl'}:4", "exam", f"{folder / 'exam.jsonl'}:40"),
    ]
    assert found.documents == {"clean": 50, "dirty": 4} and found.counts == {"clean": {}, "dirty": {"exam": 2}}
    assert found.num_contaminated == 2 and found.summary().startswith("2 of 54 training documents have 13 words in a row")


def test_near_misses_are_not_found(source, exam, tmp_path):
    words = text(7).split()
    near = [" ".join(words[:12]), " ".join([*words[:12], "changed", *words[13:25]]), " ".join(words[::2]), text(7)]
    assert find_contamination(Data(sources=[source("near", near)]), exam, cache_dir=tmp_path).num_contaminated == 0


def test_documents_held_out_of_a_source_are_looked_for_in_all(source, tmp_path):
    first = source("first", [text(number) for number in range(60)], name="first")
    second = source("second", [f"{text(number)} copied" for number in range(60)], name="second")
    found = find_contamination(Data(sources=[first, second]), Evaluation(held_out_share=0.3), cache_dir=tmp_path)
    assert found.counts["second"] == {"first": found.judged - sum(found.counts["first"].values())} or found.counts["second"]["first"] > 5
    assert all(hit.source != hit.set_name for hit in found.hits)


def test_questions_of_tasks_are_looked_for(source, exam, tmp_path):
    data = Data(sources=[source("a", [f"the answer: {text(77)}"], name="a")])
    found = find_contamination(data, exam, [Judged("quiz", "quiz: question 3", text(77))], cache_dir=tmp_path)
    assert [(hit.set_name, hit.evaluation_document) for hit in found.hits] == [("quiz", "quiz: question 3")]


def test_what_a_filter_drops_and_a_limit_leaves_out_does_not_count(source, exam, tmp_path):
    texts = [f"{text(5)} copied", text(300, 9), f"{text(6)} copied"]
    data = Data(sources=[source("a", texts, name="a", max_documents=2)], filters=[Component(name="length", min_characters=100)])
    found = find_contamination(data, exam, cache_dir=tmp_path)
    assert found.counts == {"a": {"exam": 1}} and found.documents == {"a": 1}


def test_the_filter_leaves_nothing_for_the_count_to_find(source, exam, tmp_path):
    texts = [f"{text(5)} copied", text(300)]
    filters = [Component(name="decontaminate", against=[str(tmp_path / "exam.jsonl")])]
    found = find_contamination(Data(sources=[source("a", texts, name="a")], filters=filters), exam, cache_dir=tmp_path)
    assert found.num_contaminated == 0 and found.documents == {"a": 1}


def test_workers_find_what_one_process_finds(source, exam, tmp_path, monkeypatch):
    texts = [text(1000 + number, 40) + (f" {text(number % 40)} " if number % 50 == 0 else "") for number in range(2000)]
    data = Data(sources=[source("a", texts, name="a")])
    alone = find_contamination(data, exam, cache_dir=tmp_path)
    monkeypatch.setattr("cpt.data.contamination.POOL_BYTES", 1)
    monkeypatch.setattr("cpt.data.contamination.PIECE_BYTES", 200_000)
    monkeypatch.setenv("CPT_WORKERS", "2")
    assert find_contamination(data, exam, cache_dir=tmp_path) == alone and alone.num_contaminated == 40


def test_nothing_to_look_for_is_told(source, tmp_path):
    with pytest.raises(DataError, match="no evaluation document of 8 words or more"):
        find_contamination(Data(sources=[source("a", ["x"])]), Evaluation(), cache_dir=tmp_path)
