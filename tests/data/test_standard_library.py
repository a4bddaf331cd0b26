"""The documents of a Python installation: which passages become code or prose, and how long they are."""

import pytest

from cpt.data.readers.standard_library import documents, held_out, is_held_out, write_files

LONG = "A passage about {0} that is long enough to be told from those of other files: {0}, {0}."
MODULE = '''"""{doc}

    {second}
"""
import os


@os.wrapped
class {name}:
    """Only this."""

    def one(self):
        "Says one."; return "{name}"


def two():
    """Nothing else."""
'''


@pytest.fixture
def library(tmp_path):
    """A long module, a short one, one whose passages stand in others, one that is not read, a text, and topics."""

    def write(name, text):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def module(name, doc, second):
        return MODULE.format(name=name, doc=LONG.format(doc), second=LONG.format(second))

    write("a.py", module("Apple", "apples", "pears"))
    write("b.py", module("Bean", "apples", "beans") * 2)
    write("short.py", '"""Too short."""\nx = 1\n')
    write("_sysconfigdata_x.py", module("Config", "settings", "more"))
    write("test/c.py", module("Check", "checks", "more"))
    write("below/many.py", "\n".join(f"{'x' * 690}_{number} = {number}" for number in range(9)))
    write("below/long.py", f"{'y' * 1400} = 1\n{'z' * 1593} = 2\n{'w' * 592} = 3\nv = 4\nu = 5\n")
    write("notes.txt", "\n\n".join(LONG.format(word) for word in ("notes", "beans", "more", "a b")))
    write("pydoc_data/topics.py", f"import os\ntopics = {{'b': {'bb ' * 99!r}, 'a': 'short'}}\n")
    return tmp_path


def test_modules_give_code_and_prose_without_what_is_short_or_stood_before(library):
    first, again = (LONG.format(word) for word in ("apples", "beans"))
    code = 'import os\n\n@os.wrapped\nclass Bean:\n    def one(self):\n        return "Bean"\n\ndef two():\n    pass'
    lines = [f"{'x' * 690}_{number} = {number}" for number in range(3)]
    assert list(documents(library)) == [
        ("topic b", "general", ("bb " * 99).rstrip()),
        (
            *("a.py", "general"),
            "\n\n".join([first, LONG.format("pears"), "Only this.", "Nothing else.", "Says one."]),
        ),
        ("b.py", "domain", f'{code}\n\n"""{first}\n\n    {again}\n"""\n\n{code}'),
        ("below/long.py", "domain", f"{'y' * 1400} = 1\n\n{'w' * 592} = 3\n\nv = 4"),
        ("below/many.py", "domain", "\n\n".join(lines)),
        (
            *("notes.txt", "general"),
            "\n\n".join(LONG.format(word) for word in ("notes", "more", "a b")),
        ),
    ]


def test_a_file_in_ten_is_held_out_and_evaluated_on_its_beginning(tmp_path, monkeypatch):
    library = tmp_path / "library"
    library.mkdir()
    texts = {}
    for number in range(40):
        passages = [f"{number}{word} {'x' * 900}" for word in ("one", "two", "three", "four")]
        texts[f"{number}.txt"] = "\n\n".join(passages)
        (library / f"{number}.txt").write_text(texts[f"{number}.txt"])
        code = "\n".join(f"{word} = {number}" for word in ("a" * 990, "b" * 990, "c" * 990, "d"))
        (library / f"{number}.py").write_text(code)
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(library))
    names = sorted(filter(is_held_out, texts))
    assert 2 <= len(names) <= 8
    assert held_out(kind="general") == [
        "\n\n".join(texts[name].split("\n\n")[:3]) for name in names
    ]
    code_names = sorted(f"{number}.py" for number in range(40) if is_held_out(f"{number}.py"))
    codes = held_out(kind="domain")
    assert [f"{code.rpartition(' ')[2]}.py" for code in codes] == code_names
    assert all("c = " in code and "d = " not in code for code in codes)
    folders = write_files(tmp_path / "files")
    stored = {path.name: path.read_text() for path in folders["general", "held_out"].iterdir()}
    assert stored == {name: texts[name] for name in names}
    assert len(list(folders["general", "train"].iterdir())) == 40 - len(names)
    assert len(list(folders["domain", "train"].iterdir())) == 40 - len(code_names)
    assert not (tmp_path / "files/.half_made").exists()
    (folders["general", "train"] / "mine.txt").touch()
    assert write_files(tmp_path / "files") == folders
    assert (folders["general", "train"] / "mine.txt").exists()


def test_a_document_of_fewest_characters_is_kept_and_one_of_less_is_not(tmp_path):
    for length in (199, 200):
        (tmp_path / f"{length}.txt").write_text("x" * length)
    assert [name for name, _, _ in documents(tmp_path)] == ["200.txt"]
