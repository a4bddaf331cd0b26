import pytest

from cpt.commands.demo_corpus import is_held_out, split_code, write_files

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


def test_each_module_becomes_a_file_of_code_and_one_of_prose(library, tmp_path):
    folders = write_files(tmp_path, library)
    code, prose = ((folders[kind, "train"] / "module7.py.txt").read_text() for kind in ("domain", "general"))
    assert "def count_a7b0" in code and "Count the things" not in code
    assert "Count the things of kind a7b2." in prose and "def count" not in prose
    everything = "".join(file.read_text() for folder in folders.values() for file in folder.iterdir())
    assert "count_test" not in everything and "def (:" not in everything  # tests and broken files
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


@pytest.mark.slow
def test_the_real_library_gives_enough_files_to_judge_by(tmp_path):
    seen = set()
    for (kind, part), folder in write_files(tmp_path).items():
        sizes = [path.stat().st_size for path in folder.iterdir()]
        texts = [path.read_text() for path in folder.iterdir()]
        assert len(texts) == len(set(texts)) and not (seen & set(texts))
        seen.update(texts)
        assert len(sizes) > {"train": 350, "held_out": 35}[part]
        assert part == "held_out" or sum(sizes) > {"domain": 500_000, "general": 1_000_000}[kind]
