"""Reading YAML: values as YAML 1.2 means them, lines remembered, traps closed. What we write, everyone reads back."""

import pytest
import yaml

from cpt.recipe import tree
from cpt.recipe.tree import Mistakes, UnreadableError, plain, read_text, read_yaml, resolve_scalar
from cpt.recipe.values import write_yaml


def read(text: str | bytes):
    found = Mistakes()
    try:
        root = read_text(text.encode() if isinstance(text, str) else text, "r.yaml", found)
    except UnreadableError:
        root = None
    return root, sorted(f"{place}: {said}" for place, said in found.entries)


NUMBERS = {
    "1e-4": 1e-4,
    "1E5": 1e5,
    "-2.5e+3": -2500.0,
    ".5": 0.5,
    "1.": 1.0,
    "1_000_000_000": 10**9,
    "+3": 3,
}
NUMBERS |= {"0": 0, "0x1f": 31, "0o17": 15, ".inf": float("inf")}
CONSTANTS = {"~": None, "": None, "NULL": None, "True": True}
TEXTS = (
    "no",
    "Yes",
    "on",
    "y",
    "1:30",
    "2024-01-01",
    "1__0",
    "_1",
    "1_",
    "0b11",
    "12e4567",
    "1e",
    "1.2.3",
    "e5",
    "-",
)
WORDS = {**NUMBERS, **CONSTANTS, **{word: word for word in TEXTS}}


@pytest.mark.parametrize("text", WORDS)
def test_an_unquoted_word_means_what_yaml_1_2_says(text):
    assert resolve_scalar(text) == WORDS[text] and type(resolve_scalar(text)) is type(WORDS[text])


def test_what_is_quoted_is_text_and_so_are_keys():
    root, said = read('a: "1e-4"\nb: \'true\'\nc: "010"\non: 1\n2: b\nnull: c\n')
    assert (
        plain(root) == {"a": "1e-4", "b": "true", "c": "010", "on": 1, "2": "b", "null": "c"}
        and not said
    )


def test_a_key_written_twice_is_an_error_with_both_lines():
    _, (inner, outer) = read("a: 1\nb:\n  c: 1\n  d: 2\n  c: 3\na: 2\n")
    assert inner.startswith("r.yaml:5: `c`") and "line 3" in inner
    assert outer.startswith("r.yaml:6: `a`") and "line 1" in outer


def test_anchors_repeat_a_value_and_each_copy_is_its_own():
    root, said = read("a: &x {k: [1, 2]}\nb: *x\n")
    assert plain(root) == {"a": {"k": [1, 2]}, "b": {"k": [1, 2]}} and not said
    root.value["b"].value["k"].value.clear()
    assert plain(root)["a"] == {"k": [1, 2]}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: 010", "r.yaml:1: `010`"),
        ("a: -07", "r.yaml:1: `-07`"),
        ("a: 1\nb: !!python/object/apply:os.system x\n", "r.yaml:2: the tag `"),
        ("a: 1\nb: !!int x\n", "r.yaml:2: the tag `"),
        ("a: &x [*x]\n", "r.yaml:1: nested too deeply"),
        ("a: *gone\n", "r.yaml:1: not YAML"),
        ("b: 1\na: {<<: {c: 1}}\n", "r.yaml:2: `<<`"),
        ("a: 1\n---\nb: 2\n", "r.yaml:3: a second document"),
        ("a:\n  ? [1, 2]\n  : 3\n", "r.yaml:2: a key"),
        ("a: 1\n\tb: 2\n", "r.yaml:2: not YAML: there is a tab"),
        ("a: [1, 2\nb: 3\n", "r.yaml:2: not YAML"),
        ("b: 1\na: 'x\n", "r.yaml:2: not YAML"),
        ("a: x: y\n", "r.yaml:1: not YAML"),
        ("# only a comment\n\n", "r.yaml:1: "),
        ("\n- a\n- b\n", "r.yaml:2: "),
        ("just words\n", "r.yaml:1: "),
        ("a: 1\nb: \x01\n", "r.yaml:2: not YAML"),
        (b"a: 1\nb: \xff\xfe\n", "r.yaml:2: not UTF-8"),
        ("[" * 100 + "]" * 100, "r.yaml:1: nested too deeply"),
        ("a: " + "{b: " * 5000 + "}" * 5000, "r.yaml:1: "),
    ],
)
def test_what_cannot_be_read_is_one_mistake_with_its_line(text, said):
    _, found = read(text)
    assert len(found) == 1 and found[0].startswith(said)


def test_a_bomb_of_aliases_is_refused(monkeypatch):
    monkeypatch.setattr(tree, "MAX_NODES", 500)
    lines = [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 12)]
    _, said = read("a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(lines))
    assert len(said) == 1 and "too large" in said[0]


def test_a_byte_order_mark_and_windows_line_ends_are_fine():
    root, said = read(b"\xef\xbb\xbfa: 1\r\nb: x\r\n")
    assert plain(root) == {"a": 1, "b": "x"} and not said


@pytest.mark.parametrize(("name", "hint"), [("demo.yml", "demo.yaml"), ("folder", "directory")])
def test_a_path_that_is_no_file_is_a_mistake(tmp_path, name, hint):
    (tmp_path / "folder").mkdir()
    (tmp_path / "demo.yaml").touch()
    found = Mistakes()
    with pytest.raises(UnreadableError):
        read_yaml(tmp_path / name, found)
    ((place, text),) = found.entries
    assert place.line == 1 and hint in text


# Writing


@pytest.mark.parametrize(
    "text",
    [
        "no",
        "1e-4",
        "010",
        "1:30",
        "2024-01-01",
        "null",
        "",
        "<<",
        "1_000",
        ".inf",
        "0x1f",
        "0o17",
        "=",
        "a: b",
    ],
)
def test_text_that_looks_like_something_else_stays_text(text):
    written = write_yaml({"a": text})
    assert (
        plain(read_text(written.encode(), "x", Mistakes()))
        == yaml.safe_load(written)
        == {"a": text}
    )


def test_values_are_written_as_people_write_them_in_their_order_and_without_anchors():
    shared = {"x": [1]}
    values = {"z": 1e-5, "b": 0.1, "c": True, "d": None, "e": "no", "f": shared, "g": shared}
    assert (
        write_yaml(values)
        == "z: 1e-5\nb: 0.1\nc: true\nd: null\ne: 'no'\nf:\n  x:\n  - 1\ng:\n  x:\n  - 1\n"
    )
