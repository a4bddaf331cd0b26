import ast
import json

import pytest

from cpt.demo.corpus import (
    LONGEST_FILE,
    SHORT_PASSAGE,
    beginning,
    build_corpus,
    is_held_out,
    paragraphs,
    split_code,
    write_files,
)

MODULE = '''"""What the module {n} is for: it counts things of kind {n} and tells how many there are."""

import os  # the operating system's own interfaces, of which {n} needs the paths


def count_{n}(things):
    """Count the things of kind {n}.

    Everything that is not of kind {n} is left out, and nothing is counted twice.
    """
    # a comment stays
    return sum(1 for thing in things if thing.kind == "{n}" and thing.name not in os.environ)


class Counter{n}:
    """Remembers how many things of kind {n} were counted so far."""
'''


@pytest.fixture
def library(tmp_path):
    folder = tmp_path / "library"
    (folder / "pydoc_data").mkdir(parents=True)
    (folder / "test").mkdir()
    (folder / "pydoc_data" / "topics.py").write_text(f"topics = {{'while': {'The while statement. ' * 20!r}}}\n")
    (folder / "test" / "test_it.py").write_text(MODULE.format(n="test") * 3)
    (folder / "latin.py").write_bytes(b"# coding: latin-1\nx = '\xe9'\n" * 20)
    (folder / "broken.py").write_text("def (:\n" * 50)
    for number in range(60):
        (folder / f"module{number}.py").write_text("\n\n".join(MODULE.format(n=f"a{number}b{i}") for i in range(3)))
    return folder


def texts(path):
    return [json.loads(line)["text"] for line in path.read_text().splitlines()]


def passages(path):
    """What the documents of a file were joined from, spaces aside; short ones may repeat."""
    normal = (" ".join(passage.split()) for text in texts(path) for passage in text.split("\n\n"))
    return [passage for passage in normal if len(passage) >= SHORT_PASSAGE]


@pytest.fixture(scope="module")
def real_corpus(tmp_path_factory):
    return build_corpus(tmp_path_factory.mktemp("corpus"))


def test_the_same_library_gives_the_same_files(library, tmp_path):
    first, second = build_corpus(tmp_path / "a", library), build_corpus(tmp_path / "b", library)
    for key, path in first.files.items():
        assert path.read_bytes() == second.files[key].read_bytes()
        assert first.documents[key] == len(texts(path)) > 0


@pytest.mark.slow
def test_no_general_passage_occurs_twice_in_any_file(real_corpus):
    every = [
        passage for (kind, _), path in real_corpus.files.items() if kind == "general" for passage in passages(path)
    ]
    assert len(every) == len(set(every)) > 10_000


@pytest.mark.parametrize("kind", ["domain", "general"])
def test_held_out_documents_are_never_in_training(real_corpus, kind):
    trained_on = {text for (_, part), path in real_corpus.files.items() if part == "train" for text in texts(path)}
    held_out = texts(real_corpus.files[kind, "held_out"])
    assert len(held_out) == len(set(held_out)) >= 60
    assert not trained_on & set(held_out)


def test_domain_documents_hold_no_docstring(real_corpus):
    for text in texts(real_corpus.files["domain", "held_out"]):
        definitions = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        assert not [n for n in ast.walk(ast.parse(text)) if isinstance(n, definitions) and ast.get_docstring(n)]


def test_the_real_library_is_enough_to_learn_from(real_corpus):
    assert real_corpus.num_bytes["domain", "train"] > 3_000_000
    assert real_corpus.num_bytes["general", "train"] > 1_000_000
    for kind in ("domain", "general"):
        share = real_corpus.num_bytes[kind, "held_out"] / real_corpus.num_bytes[kind, "train"]
        assert 0.04 < share < 0.25


def test_code_and_docstrings_of_a_module_part(library):
    code, docstrings = split_code((library / "module0.py").read_text())
    assert "# a comment stays" in "\n".join(code)
    assert "Count the things" not in "\n".join(code)
    assert "Count the things of kind a0b0." in docstrings
    assert compile("\n".join(code), "module0.py", "exec")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ('def f(): "Do nothing."', ["def f(): pass"]),
        ('def f(): "Do."; return 1', ["def f(): return 1"]),
        ('class A:\n    """Doc."""\n', ["class A:\n    pass"]),
        ('class A:\n    """Doc\n    string."""\n\n    x = 1\n', ["class A:\n    x = 1"]),
        ('@decorator\ndef f():\n    """Dé."""; return "é"\n', ['@decorator\ndef f():\n    return "é"']),
        ('"""Only a docstring."""\n', []),
    ],
)
def test_docstrings_are_taken_out_and_the_code_stays_whole(source, expected):
    code, _ = split_code(source)
    assert code == expected


def test_tests_broken_files_and_other_encodings_are_left_out(library, tmp_path):
    corpus = build_corpus(tmp_path, library)
    everything = "".join(path.read_text() for path in corpus.files.values())
    assert "count_test" not in everything
    assert "def (:" not in everything
    assert "The while statement" in everything


def test_a_file_is_held_out_as_a_whole_by_its_name():
    names = [f"module{number}.py" for number in range(1000)]
    assert 60 < sum(map(is_held_out, names)) < 140


def test_paragraphs_lose_their_common_indentation():
    assert paragraphs("\n  One\n    two\n\n  Three\n") == ["One\n  two", "Three"]


def test_each_module_becomes_a_file_of_code_and_one_of_prose(library, tmp_path):
    folders = write_files(tmp_path, library)
    code, prose = ((folders[kind, "train"] / "module7.py.txt").read_text() for kind in ("domain", "general"))
    assert "def count_a7b0" in code and "Count the things" not in code
    assert "Count the things of kind a7b2." in prose and "def count" not in prose
    topic = "held_out" if is_held_out("topic while") else "train"
    assert "The while statement" in (folders["general", topic] / "topic.while.txt").read_text()


def test_a_module_is_held_out_with_its_code_and_its_prose(library, tmp_path):
    folders = write_files(tmp_path, library)
    for (_, part), path in folders.items():
        names = {file.name.removesuffix(".txt") for file in path.iterdir() if file.name.startswith("module")}
        assert names and all(is_held_out(name) == (part == "held_out") for name in names)


def test_folders_that_are_there_stay_and_half_made_ones_are_made_anew(library, tmp_path):
    folders = write_files(tmp_path, library)
    names = sorted(path.name for path in folders["general", "train"].iterdir())
    (folders["domain", "train"] / "mine.txt").write_text("mine")
    assert (write_files(tmp_path, library)["domain", "train"] / "mine.txt").exists()
    folders["general", "train"].rename(tmp_path / "elsewhere")
    assert sorted(path.name for path in write_files(tmp_path, library)["general", "train"].iterdir()) == names
    assert not (folders["domain", "train"] / "mine.txt").exists() and not (tmp_path / ".half_made").exists()


def test_a_file_takes_the_first_statements_that_fit():
    assert beginning(["a" * 1500, "b" * (LONGEST_FILE + 1), "c" * 1400, "d" * 10]) == ["a" * 1500, "c" * 1400]


@pytest.mark.slow
def test_the_real_library_gives_enough_files_to_judge_by(tmp_path):
    for (kind, part), folder in write_files(tmp_path).items():
        sizes = [path.stat().st_size for path in folder.iterdir()]
        assert len(sizes) > {"train": 350, "held_out": 35}[part]
        assert part == "held_out" or sum(sizes) > {"domain": 500_000, "general": 1_000_000}[kind]
