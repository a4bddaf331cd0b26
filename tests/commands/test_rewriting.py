import json
from collections import Counter

import pytest

from cpt.commands import rewriting
from cpt.commands.rewriting import Task, find_prompt, rewrite, sha256, why_dropped
from cpt.commands.rewriting_model import Answer, Sampling
from cpt.errors import LaunchError, RecipeError, ResourceError
from cpt.files import locked
from cpt.recipe.schema import DocumentSource, Model


@pytest.fixture
def corpus(tmp_path):
    """Seven documents of different lengths."""
    file = tmp_path / "corpus.jsonl"
    file.write_text(
        "".join(
            json.dumps({"text": f"Document {number}. " + "It says a thing. " * number}) + "\n" for number in range(7)
        )
    )
    return file


@pytest.fixture
def task(model_folder, corpus):
    """`task(batch_size=2)`: a task of seven documents, all answers of 16 tokens kept."""

    def make(**options):
        sampling = options.pop("sampling", Sampling(max_new_tokens=16, temperature=1.0))
        source = DocumentSource(path=str(options.pop("path", corpus)))
        defaults = {"prompt": find_prompt("easy"), "cut_off": "keep", "min_characters": 1, "max_input_tokens": 60}
        return Task(source, Model(path=str(model_folder)), sampling=sampling, **{**defaults, **options})

    return make


def rows_of(folder):
    return [json.loads(line) for file in sorted(folder.glob("*.jsonl")) for line in file.read_text().splitlines()]


def bytes_of(folder):
    return {file.name: file.read_bytes() for file in sorted(folder.glob("*.jsonl"))}


def test_each_text_says_where_it_comes_from(task, tmp_path, corpus, model_folder):
    done = rewrite(task(max_input_tokens=1000), tmp_path / "out")
    rows = rows_of(tmp_path / "out")
    assert (done.documents, done.pieces, done.texts + done.dropped.total()) == (7, 7, 7) and len(
        rows
    ) == done.texts > 4
    first, text = rows[0], json.loads(corpus.read_text().splitlines()[0])["text"]
    assert first["source_text_hash"] == sha256(text) and first["source_where"] == f"{corpus}:1"
    assert first["model"] == str(model_folder) and first["model_revision"] is None and len(first["model_sha256"]) == 64
    assert first["prompt"] == "easy" and first["prompt_sha256"] == find_prompt("easy").sha256 and first["cpt_version"]
    assert first["sampling"] == {"max_new_tokens": 16, "temperature": 1.0, "top_p": 0.95} and first["cut_off"] is True
    assert len({row["seed"] for row in rows}) == len(rows) and first["run_seed"] == 42


def test_a_long_document_becomes_several_texts(task, tmp_path):
    done = rewrite(task(), tmp_path / "out")
    pieces = Counter(row["source_where"].rpartition(":")[2] for row in rows_of(tmp_path / "out"))
    assert done.pieces > done.documents == 7 and pieces["7"] >= 2
    assert all(row["piece"] < row["pieces"] for row in rows_of(tmp_path / "out"))


def test_neither_batches_nor_groups_nor_the_order_change_a_text(task, tmp_path, corpus, monkeypatch):
    rewrite(task(batch_size=8), tmp_path / "together")
    lines = corpus.read_text().splitlines()
    corpus.write_text("\n".join(reversed(lines)) + "\n")
    monkeypatch.setattr(rewriting, "GROUP", 3)
    rewrite(task(batch_size=1), tmp_path / "alone")
    together, alone = (
        {row["source_text_hash"]: row["text"] for row in rows_of(tmp_path / name)} for name in ("together", "alone")
    )
    assert together == alone and len(together) > 4


def test_what_is_done_is_not_done_again_and_an_interrupted_run_ends_the_same(task, tmp_path, monkeypatch):
    monkeypatch.setattr(rewriting, "GROUP", 2)
    rewrite(task(), tmp_path / "straight")

    def interrupt(done):
        if done.documents == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rewrite(task(), tmp_path / "out", interrupt)
    before = bytes_of(tmp_path / "out")
    assert len(before) == 2
    times = {file: file.stat().st_mtime_ns for file in (tmp_path / "out").glob("*.jsonl")}
    done = rewrite(task(), tmp_path / "out")
    assert (
        done.groups_done_before == 2
        and done.documents == 7
        and all(file.stat().st_mtime_ns == time for file, time in times.items())
    )
    assert bytes_of(tmp_path / "out") == bytes_of(tmp_path / "straight")


def test_a_source_that_has_changed_is_made_anew_where_it_has(task, tmp_path, corpus, monkeypatch):
    monkeypatch.setattr(rewriting, "GROUP", 2)
    whole = task(max_input_tokens=1000)
    rewrite(whole, tmp_path / "out")
    lines = corpus.read_text().splitlines()
    corpus.write_text("\n".join([*lines[:2], json.dumps({"text": "Another."}), *lines[3:4]]) + "\n")
    done = rewrite(whole, tmp_path / "out")
    assert done.groups_done_before == 1 and done.documents == 4 and len(bytes_of(tmp_path / "out")) == 2
    rewrite(whole, tmp_path / "fresh")
    assert bytes_of(tmp_path / "out") == bytes_of(tmp_path / "fresh")


def test_a_group_whose_file_was_removed_is_made_again(task, tmp_path):
    rewrite(task(), tmp_path / "out")
    before = bytes_of(tmp_path / "out")
    (tmp_path / "out" / "rewritten-00000.jsonl").unlink()
    assert rewrite(task(), tmp_path / "out").groups_done_before == 0
    assert bytes_of(tmp_path / "out") == before


def test_another_task_another_process_and_a_file_are_refused(task, tmp_path):
    rewrite(task(), tmp_path / "out")
    with pytest.raises(RecipeError, match="run_seed"):
        rewrite(task(seed=7), tmp_path / "out")
    with locked(tmp_path / "out" / ".rewrite" / "lock", ""), pytest.raises(LaunchError):
        rewrite(task(), tmp_path / "out")
    (tmp_path / "file").touch()
    with pytest.raises(ResourceError):
        rewrite(task(), tmp_path / "file")


def test_dropped_answers_are_counted_by_reason_and_leave_no_empty_file(task, tmp_path):
    done = rewrite(task(cut_off="drop"), tmp_path / "out")
    assert done.dropped["cut off at max_new_tokens"] == done.pieces - done.texts > 0
    none = rewrite(task(cut_off="drop", min_characters=1000), tmp_path / "none")
    assert none.texts == 0 and not list((tmp_path / "none").glob("*.jsonl"))
    again = rewrite(task(cut_off="drop", min_characters=1000), tmp_path / "none")
    assert again.groups_done_before == 1 and again.dropped == none.dropped


@pytest.mark.parametrize(
    "answer, reason",
    [
        (Answer("", False), "empty"),
        (Answer("something new", True), "cut off at max_new_tokens"),
        (Answer("The  text\nitself", False), "copied from the text"),
        (Answer("short", False), "too short"),
        (Answer("something new of some length", False), None),
    ],
)
def test_why_an_answer_is_dropped(task, answer, reason):
    assert why_dropped(answer, "This is the text itself.", task(cut_off="drop", min_characters=10)) == reason


def test_a_window_that_is_too_small_is_told_before_anything_is_made(task, tmp_path):
    with pytest.raises(RecipeError, match="need up to .* tokens, .* window has 2,048. Lower --max-input-tokens"):
        rewrite(task(sampling=Sampling(max_new_tokens=2000)), tmp_path / "out")
