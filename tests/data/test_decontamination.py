import os
import random
from pathlib import Path

import pytest

from cpt.data.readers.decontamination import EvaluationDocument, read_runs, runs_of_files
from cpt.data.readers.filters import build_components, reason_to_drop
from cpt.data.rows.contamination import (
    Hit,
    find_contamination,
    held_out_documents,
    search_training,
    small_sets,
    with_decontamination,
)
from cpt.errors import DataError, RecipeError
from cpt.recipe.schema import Component, Data, Evaluation, HeldOut, Source

WORDS = [f"word{number}" for number in range(5000)]


def text(seed, count=60):
    return " ".join(random.Random(seed).choices(WORDS, k=count))


# Runs of words


@pytest.fixture(scope="module")
def runs():
    return read_runs(
        EvaluationDocument("exam", f"exam.jsonl:{number}", text(number)) for number in range(1, 41)
    )


@pytest.mark.parametrize("begin", [0, 7, 30])
def test_half_a_document_is_found_whatever_is_around_it(runs, begin):
    planted = text(17).split()[begin : begin + 30]
    found = runs.find(f"{text(900, 500)} {' '.join(planted)} {text(901)}")
    assert (found.set_name, found.where, found.words) == (
        "exam",
        "exam.jsonl:17",
        " ".join(planted[:8]),
    )
    assert found.is_contaminated and found.share == 0.5


def test_less_than_half_is_a_phrase_and_no_contamination(runs):
    words = text(17).split()
    found = runs.find(f"{text(900)} {' '.join(words[5:34])} {text(901)}")
    assert (
        found.where == "exam.jsonl:17"
        and not found.is_contaminated
        and found.share == pytest.approx(29 / 60)
    )
    assert runs.find(f"{text(900)} {' '.join(words[5:12])} {text(901)}") is None


def test_a_part_of_a_document_is_found_where_it_is_half_of_what_is_trained_on():
    book = read_runs([EvaluationDocument("book", "1", text(1, 2000))])
    part = " ".join(text(1, 2000).split()[400:460])
    found = book.find(f"{part} {text(2, 50)}")
    assert found.is_contaminated
    assert (found.share, found.own_share) == (60 / 2000, 60 / 110)
    assert not book.find(f"{part} {text(2, 70)}").is_contaminated


def test_few_words_are_no_contamination_unless_they_are_all_of_a_short_document(runs):
    words = text(17).split()
    for count, is_contaminated in ((12, False), (13, True)):
        found = runs.find(" ".join(words[5 : 5 + count]))
        assert (found.own_share, found.share) == (1.0, count / 60)
        assert found.is_contaminated == is_contaminated
    short = read_runs([EvaluationDocument("short", "1", text(50, 9))])
    assert short.find(f"{text(51, 100)} {text(50, 9)}").is_contaminated
    assert not short.find(" ".join(text(50, 9).split()[:8])).is_contaminated


@pytest.mark.parametrize(
    ("share", "own_share", "words"),
    [
        (0.5, 0.5, "contains 50% of the words of exam.txt (set exam)"),
        (0.2, 0.61, "has 61% of its words from exam.txt (set exam)"),
    ],
)
def test_the_larger_of_two_shares_is_reported(share, own_share, words):
    hit = Hit("a", "a.txt", "exam", "exam.txt", "one two", share, own_share)
    assert str(hit) == f'a.txt (a) {words}, for example "one two"'


def test_case_and_punctuation_do_not_hide_it(runs):
    planted = ",\n".join(f'"{word.upper()}!"' for word in text(17).split()[:40])
    assert (found := runs.find(planted)).where == "exam.jsonl:17" and found.is_contaminated


def test_words_that_many_evaluation_documents_share_are_ignored():
    header = text(999, 30)
    runs = read_runs(
        EvaluationDocument("code", str(number), f"{header} {text(number)}") for number in range(100)
    )
    assert runs.find(f"{header} {text(2000)}") is None
    copy = runs.find(f"{text(2000, 200)} {' '.join(text(3).split()[:35])}")
    # The header's last 7 words make runs with a document's first ones.
    assert copy.is_contaminated and copy.share == pytest.approx(35 / 67)


def test_chinese_is_compared_by_characters():
    runs = read_runs(
        [EvaluationDocument("zh", "1", "催化剂是一种能加快化学反应速度而本身不被消耗的物质")]
    )
    assert runs.find("他写道:催化剂是一种能加快化学反应速度而本身不被消耗").is_contaminated
    assert runs.find("催化剂是一种很贵的金属,大多数工厂都不愿意购买它") is None


# In the sources of a recipe


@pytest.fixture
def exam(source):
    return Evaluation(
        perplexity=[HeldOut(path=source("exam", [text(n) for n in range(40)]).path, name="exam")]
    )


def test_a_document_that_is_held_out_of_its_source_is_no_copy_of_itself(source, tmp_path):
    data = Data(sources=[source("a", [text(number) for number in range(60)])])
    found = find_contamination(data, Evaluation(held_out_share=0.3))
    assert (
        found.num_exact_copies == 0
        and found.evaluated > 5
        and found.documents == {"a": 60 - found.evaluated}
    )


@pytest.mark.heavy
def test_workers_find_what_one_process_finds(source, exam, tmp_path, monkeypatch):
    texts = [text(1000 + n, 40) + (f" {text(n % 40)} " if n % 50 == 0 else "") for n in range(600)]
    texts[101] = texts[501] = text(3)
    data = Data(sources=[source("a", texts)])
    alone = find_contamination(data, exam)
    monkeypatch.setattr("cpt.data.store.parallel.POOL_BYTES", 1)
    monkeypatch.setattr("cpt.data.rows.contamination.PIECE_BYTES", 60_000)
    monkeypatch.setenv("CPT_WORKERS", "2")
    assert find_contamination(data, exam) == alone
    assert (alone.num_contaminated, alone.num_exact_copies) == (12, 2)


# The filter


def data_of(*filters):
    return Data(
        sources=[Source(path="a.jsonl")],
        filters=[Component(name="length", min_characters=5), *filters],
    )


@pytest.fixture
def exam_text(tmp_path):
    (tmp_path / "exam.txt").write_text(text(5))
    return Evaluation(perplexity=[HeldOut(path=str(tmp_path / "exam.txt"), name="exam")])


@pytest.fixture
def dropped(tmp_path):
    """`dropped(data, evaluation, 5, 7)`: why documents with these texts are dropped."""

    def reasons(data, evaluation, *seeds):
        filters = with_decontamination(data, evaluation, tmp_path / "cache").filters
        built = build_components("filter", {"data.filters": filters})
        return [
            reason_to_drop({"text": f"{text(seed)} copied", "source": "s", "where": "w"}, built)
            for seed in seeds
        ]

    return reasons


def test_files_of_the_users_own_are_looked_for_too(exam_text, dropped, tmp_path):
    (tmp_path / "quiz.txt").write_text(text(7))
    data = data_of(Component(name="decontaminate", against=[str(tmp_path / "quiz.txt")]))
    assert dropped(data, exam_text, 5, 7, 8) == ["contaminated: exam", "contaminated: quiz", None]
    assert dropped(data_of(), exam_text, 5, 7) == ["contaminated: exam", None]


def test_a_run_that_began_with_another_comparison_keeps_it_and_its_other_filters(
    exam_text, tmp_path
):
    (tmp_path / "quiz.txt").write_text(text(7))
    own = Component(name="decontaminate", against=[str(tmp_path / "quiz.txt")])
    plain = Component(name="decontaminate")
    data, cache = data_of(plain, own), tmp_path / "cache"
    length = {"name": "length", "min_characters": 5}
    now, then = (
        [
            {"name": one.name, **one.options}
            for one in with_decontamination(data, exam_text, cache, *comparison).filters
        ]
        for comparison in ((), (3,))
    )
    index = now[2].pop("index")
    against = {"name": "decontaminate", "against": [str(tmp_path / "quiz.txt")]}
    assert now == [length, against, {"name": "decontaminate"}]
    of_then = then[2].pop("index")
    assert then == [
        length,
        {**against, "comparison": 3},
        {"name": "decontaminate", "comparison": 3},
    ]
    assert index != of_then and all(Path(path).is_file() for path in (index, of_then))


def test_a_recipe_may_refuse_the_filter_and_needs_something_to_look_for(exam_text, tmp_path):
    refused = data_of(Component(name="decontaminate", own_evaluation=False))
    assert with_decontamination(refused, exam_text, tmp_path / "cache") == refused
    own = data_of(Component(name="decontaminate", against=["quiz.txt"]))
    assert with_decontamination(own, Evaluation(), tmp_path / "cache") == own
    assert with_decontamination(data_of(), Evaluation(), tmp_path / "cache") == data_of()
    for needs in (
        [Component(name="decontaminate")],
        [Component(name="decontaminate"), own.filters[1]],
    ):
        with pytest.raises(RecipeError, match="`decontaminate` needs evaluation documents"):
            with_decontamination(data_of(*needs), Evaluation(), tmp_path / "cache")


def test_an_index_that_is_damaged_or_gone_is_made_again_the_same(exam_text, tmp_path, caplog):
    def index():
        data = with_decontamination(data_of(), exam_text, tmp_path / "cache")
        return Path(data.filters[-1].options["index"])

    content = index().read_bytes()
    for damaged in (content[:-9] + bytes(9), None):
        path = index()
        path.chmod(0o644)
        path.unlink()
        if damaged is not None:
            path.write_bytes(damaged)
        assert index().read_bytes() == content


def test_a_search_tells_all_that_it_found(source, tmp_path):
    exam = [text(number) for number in range(20)] + ["too short", text(3, 7)]
    evaluation = Evaluation(perplexity=[HeldOut(path=source("exam", exam).path, name="exam")])
    copies = [f"{text(number)} copied" for number in range(3)]
    phrases = [f"{text(900)} {' '.join(text(9).split()[:12])} {text(901)}"]
    first = source("a", [*copies, *phrases, text(5), text(6), "too short", text(500)])
    second = source("b", [text(501), f"new {text(4)}"])
    found = find_contamination(Data(sources=[first, second]), evaluation)
    words = " ".join(text(0).split()[:8])
    assert found.documents == {"a": 5, "b": 2} and found.counts == {
        "a": {"exam": 3},
        "b": {"exam": 1},
    }
    assert (found.touched, found.evaluated, found.too_short) == (1, 20, 2)
    assert (found.num_contaminated, found.num_exact_copies) == (4, 3)
    assert [
        (hit.source, hit.where.rpartition("/")[2], hit.evaluation_document.rpartition("/")[2])
        for hit in found.hits
    ] == [
        ("a", "a.jsonl:1", "exam.jsonl:1"),
        ("a", "a.jsonl:2", "exam.jsonl:2"),
        ("a", "a.jsonl:3", "exam.jsonl:3"),
        ("b", "b.jsonl:2", "exam.jsonl:5"),
    ]
    assert (found.hits[0].set_name, found.hits[0].words, found.hits[0].share) == (
        "exam",
        words,
        1.0,
    )
    assert found.summary() == (
        "4 of 7 training documents contain at least half of one of the 20 evaluation documents, or have half of their"
        " words from one. 3 more are equal to an evaluation document and dropped by hash. 1 more share a phrase with"
        " one (8 or more words in a row). 2 with fewer than 8 words were not searched for."
    )
    assert found.to_json()["contaminated"] == 4 and found.to_json()["hits"][3]["source"] == "b"
    clean = find_contamination(
        Data(sources=[source("c", [text(700)])]),
        Evaluation(perplexity=[HeldOut(path=source("quiz", [text(800)]).path, name="quiz")]),
    )
    assert clean.summary().endswith("words from one.") and clean.counts == {"c": {}}


def test_of_each_source_the_first_hits_are_listed_whichever_job_finds_them(
    source, exam, monkeypatch
):
    monkeypatch.setattr("cpt.data.rows.contamination.LISTED", 3)
    monkeypatch.setattr("cpt.data.rows.contamination.PIECE_BYTES", 900)
    first = source("a", [f"{text(number)} copied" for number in (1, 2, 3, 4, 5)])
    second = source("b", [text(900), f"{text(6)} copied", text(901), f"{text(7)} copied"])
    found = find_contamination(Data(sources=[first, second]), exam)
    places = [(hit.source, hit.evaluation_document.rpartition(":")[2]) for hit in found.hits]
    assert places == [("a", "2"), ("a", "3"), ("a", "4"), ("b", "7"), ("b", "8")]
    assert found.counts == {"a": {"exam": 5}, "b": {"exam": 2}}
    assert found.hits[3].own_share == pytest.approx(60 / 61)


def test_a_copy_of_a_question_is_contamination_and_runs_of_what_is_read_are_copied(source, exam):
    question = EvaluationDocument("quiz", "question 1", text(777))
    phrase = f"{text(900)} {' '.join(text(9).split()[:12])} {text(901)}"
    texts = [text(777), text(5), phrase, f"{text(6)} copied"]
    data = Data(sources=[source("a", texts), source("b", [phrase])])
    search = search_training(data, exam, [question])
    assert search.contamination.counts == {"a": {"quiz": 1, "exam": 1}, "b": {}}
    assert (search.contamination.num_exact_copies, search.contamination.touched) == (1, 2)
    of_phrase = read_runs([EvaluationDocument("", "", " ".join(text(9).split()[:12]))]).hashes
    assert search.copied.tolist() == of_phrase.tolist()
    refused = data.model_copy(
        update={"filters": [Component(name="decontaminate", own_evaluation=False)]}
    )
    copied = search_training(refused, exam, [question]).copied
    assert len(copied) == 5 + 2 * 53 and sorted(copied) == copied.tolist()
    with pytest.raises(DataError, match="nothing to search for"):
        find_contamination(data, Evaluation(), [question._replace(text="too short")])


def test_sets_of_few_documents_are_small(source):
    sets = [source(str(count), ["a text"] * count).path for count in (2, 3, 1, 4)]
    evaluation = Evaluation(
        perplexity=[HeldOut(path=path) for path in ["memory://nowhere.txt", *sets]]
    )
    data = Data(sources=[Source(path="a.txt")])
    found = [
        (key, held_out.path, count) for key, held_out, count in small_sets(data, evaluation, 3)
    ]
    assert found == [
        ("evaluation.perplexity[1]", sets[0], 2),
        ("evaluation.perplexity[3]", sets[2], 1),
    ]


def test_documents_that_are_searched_for_are_those_that_a_build_holds_out(build, source):
    texts = [
        f"{number} {'x' * (number % 90)} {'y' * 3000 * (number > 290)}" for number in range(300)
    ]
    first, second = source("a", texts[:200]), source("b", texts[200:])
    evaluation = Evaluation(held_out_share=0.3)
    built = build(first, second, evaluation=evaluation)
    data = Data(sources=[first, second, Source(path="memory://nowhere")])
    searched = list(held_out_documents(data, evaluation, only_local=True))
    for name, path in (("a", first.path), ("b", second.path)):
        held_out = built.held_out[name]
        documents = built.tokenized[name].documents([0])
        chosen = documents.num_bytes[held_out.chosen].tolist()
        own = [document for document in searched if document.set_name == name]
        assert [len(document.text) for document in own] == chosen
        assert all(document.where.startswith(path) for document in own)
    longest = max(len(document.text) for document in searched)
    assert 90 < longest < 3000, "very long ones are trained on"
    assert not list(held_out_documents(data, Evaluation()))


@pytest.mark.parametrize(
    "change", [{"name": "other"}, {"max_documents": 1}, {"text_documents": "line"}]
)
def test_another_set_of_the_same_file_has_another_index(exam_text, tmp_path, change):
    def index(evaluation):
        data = with_decontamination(data_of(), evaluation, tmp_path / "cache")
        return data.filters[-1].options["index"]

    (held_out,) = exam_text.perplexity
    with (tmp_path / "exam.txt").open("a") as file:
        file.write(f"\n{text(6)}")
    other = exam_text.model_copy(update={"perplexity": [held_out.model_copy(update=change)]})
    same = change == {"max_documents": 1}  # it has one document
    assert (index(exam_text) == index(other)) == same
    assert index(exam_text) == index(exam_text)


def test_documents_held_out_by_their_hash_are_looked_for_in_all_sources(build, source):
    first = source("first", [text(number) for number in range(60)])
    second = source("second", [f"{text(number)} copied" for number in range(60)])
    built = build(first, second, evaluation=Evaluation(held_out_share=0.3))
    one, other = built.sources
    assert other.dropped["contaminated: first"] + other.documents + other.held_out == 60
    held_out = built.held_out["first"].num_documents + built.held_out["second"].num_documents
    assert held_out > 20 and max(one.documents, other.documents) < 60 - held_out / 2
    assert "contaminated: second" in one.dropped


def test_the_index_is_read_again_only_when_a_file_changed(exam_text, tmp_path, monkeypatch):
    first = with_decontamination(data_of(), exam_text, tmp_path / "cache")
    with monkeypatch.context() as patched:
        patched.setattr("cpt.data.rows.contamination.read_runs", None)
        assert with_decontamination(data_of(), exam_text, tmp_path / "cache") == first
    times = (tmp_path / "exam.txt").stat()
    (tmp_path / "exam.txt").write_text(text(5).replace(text(5)[:8], "other001", 1))
    os.utime(tmp_path / "exam.txt", ns=(times.st_atime_ns, times.st_mtime_ns))
    assert (tmp_path / "exam.txt").stat().st_size == times.st_size
    assert with_decontamination(data_of(), exam_text, tmp_path / "cache") != first


def test_other_content_of_the_same_size_and_time_in_own_files_is_filtered_anew(
    build, source, tmp_path
):
    quiz, train = tmp_path / "quiz.txt", source("train", [text(100), f"{text(101)} {text(7)}"])
    quiz.write_text(text(8))
    against = Component(name="decontaminate", against=[str(quiz)])
    (before,) = build(train, filters=[against]).sources
    times = quiz.stat()
    quiz.write_text(text(7).ljust(times.st_size)[: times.st_size])
    os.utime(quiz, ns=(times.st_atime_ns, times.st_mtime_ns))
    runs_of_files.cache_clear()  # as in the next process
    (after,) = build(train, filters=[against]).sources
    assert (before.documents, after.documents) == (2, 1)


def test_the_stored_tokens_are_found_again_by_another_cache_and_place(build, source, tmp_path):
    keys = []
    for place in ("here", "there"):
        exam = tmp_path / place / "exam.txt"
        exam.parent.mkdir()
        exam.write_text(text(5))
        evaluation = Evaluation(perplexity=[HeldOut(path=str(exam), name="exam")])
        built = build(
            source("train", [text(100), f"{text(101)} {text(5)}"]),
            evaluation=evaluation,
            cache=place,
        )
        keys.append((built.chunked[0].tokenized.folder.name, built.fingerprint))
    assert keys[0] == keys[1]
