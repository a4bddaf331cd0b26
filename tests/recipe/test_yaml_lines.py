"""Reading YAML: values as YAML 1.2 means them, lines remembered, traps closed."""

from pathlib import Path

import pytest

from cpt.recipe.tree import Mistakes, UnreadableError, place_of, plain, read_text, read_yaml, resolve_scalar


def read(text: str | bytes):
    found = Mistakes()
    try:
        root = read_text(text.encode() if isinstance(text, str) else text, "r.yaml", found)
    except UnreadableError:
        root = None
    return root, sorted(f"{place}: {said}" for place, said in found.found)


WORDS = {
    "1e-4": 1e-4,
    "1E5": 1e5,
    "-2.5e+3": -2500.0,
    ".5": 0.5,
    "1.": 1.0,
    "1_000_000_000": 10**9,
    "+3": 3,
    "0": 0,
    "0x1f": 31,
    "0o17": 15,
    ".inf": float("inf"),
    "~": None,
    "": None,
    "NULL": None,
    "True": True,
    **{word: word for word in ("no", "Yes", "on", "y", "1:30", "2024-01-01", "1__0", "_1", "1_", "0b11", "12e4567")},
    **{word: word for word in ("1e", "1.2.3", "e5", "nan", "-")},
}


@pytest.mark.parametrize("text", WORDS)
def test_an_unquoted_word_means_what_yaml_1_2_says(text):
    assert resolve_scalar(text) == WORDS[text] and type(resolve_scalar(text)) is type(WORDS[text])


@pytest.mark.parametrize("text", ["010", "00", "-07", "0_1"])
def test_a_number_with_a_leading_zero_is_an_error(text):
    _, said = read(f"a: {text}")
    assert len(said) == 1 and said[0].startswith(f"r.yaml:1: `{text}` begins with 0")


def test_what_is_quoted_is_text():
    root, said = read('a: "1e-4"\nb: \'true\'\nc: "010"\ne: |\n  5\n')
    assert plain(root) == {"a": "1e-4", "b": "true", "c": "010", "e": "5\n"} and not said


def test_keys_are_their_text():
    root, said = read("on: 1\n2: b\nnull: c\ntrue: d\n")
    assert plain(root) == {"on": 1, "2": "b", "null": "c", "true": "d"} and not said


def test_every_value_has_its_line():
    root, _ = read("a:\n  b:\n    - x\n    - c: 1\n      d: 2\n")
    places = [("a",), ("a", "b"), ("a", "b", 0), ("a", "b", 1), ("a", "b", 1, "d")]
    assert [place_of(root, where).line for where in places] == [1, 2, 3, 4, 5]


def test_a_key_written_twice_is_an_error_with_both_lines():
    root, said = read("a: 1\nb:\n  c: 1\n  d: 2\n  c: 3\na: 2\n")
    assert said == [
        "r.yaml:5: `c` is written twice, first in line 3",
        "r.yaml:6: `a` is written twice, first in line 1",
    ]


@pytest.mark.parametrize("tag", ["!!python/object/apply:os.system", "!mine", "!!int", "!!str"])
def test_tags_are_refused_with_their_line(tag):
    _, said = read(f"a: 1\nb: {tag} x\n")
    assert len(said) == 1 and said[0].startswith("r.yaml:2: the tag `")


def test_anchors_repeat_a_value_and_each_copy_is_its_own():
    root, said = read("a: &x {k: [1, 2]}\nb: *x\n")
    assert plain(root) == {"a": {"k": [1, 2]}, "b": {"k": [1, 2]}} and not said
    root.value["b"].value["k"].value.clear()
    assert plain(root)["a"] == {"k": [1, 2]}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: &x [*x]\n", "r.yaml:1: nested too deeply"),
        ("a: *gone\n", "r.yaml:1: not YAML"),
        ("b: 1\na: {<<: {c: 1}}\n", "r.yaml:2: `<<`"),
        ("a: 1\n---\nb: 2\n", "r.yaml:3: a second document"),
        ("a:\n  ? [1, 2]\n  : 3\n", "r.yaml:2: a key"),
        ("a: 1\n\tb: 2\n", "r.yaml:2: not YAML: there is a tab"),
        ("a: [1, 2\nb: 3\n", "r.yaml:2: not YAML"),
        ("b: 1\na: 'x\n", "r.yaml:2: not YAML"),
        ("a: 1\nb: {c: 1\n", "r.yaml:2: not YAML"),
        ("a: 1\n b: 2\n", "r.yaml:2: not YAML"),
        ("a: x: y\n", "r.yaml:1: not YAML"),
        ("", "r.yaml:1: the file is empty"),
        ("# only a comment\n\n", "r.yaml:1: the file is empty"),
        ("\n- a\n- b\n", "r.yaml:2: expected `key: value`"),
        ("just words\n", "r.yaml:1: expected `key: value`"),
        ("a: 1\nb: \x01\n", "r.yaml:2: not YAML"),
        (b"a: 1\nb: \xff\xfe\n", "r.yaml:2: not UTF-8 text: byte 0xff"),
        ("[" * 100 + "]" * 100, "r.yaml:1: nested too deeply"),
        ("a: " + "{b: " * 5000 + "}" * 5000, "r.yaml:1: "),
    ],
)
def test_what_cannot_be_read_is_one_mistake_with_its_line(text, said):
    _, found = read(text)
    assert len(found) == 1 and found[0].startswith(said)


def test_a_bomb_of_aliases_is_refused():
    bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 12)
    )
    _, said = read(bomb)
    assert len(said) == 1 and "too large for a recipe" in said[0]


def test_a_byte_order_mark_and_windows_line_ends_are_fine():
    root, said = read(b"\xef\xbb\xbfa: 1\r\nb: x\r\n")
    assert plain(root) == {"a": 1, "b": "x"} and not said


@pytest.mark.parametrize(("name", "hint"), [("gone.yaml", ""), ("demo.yml", "demo.yaml"), ("folder", "directory")])
def test_a_path_that_is_no_file_is_a_mistake(tmp_path: Path, name, hint):
    (tmp_path / "folder").mkdir()
    (tmp_path / "demo.yaml").touch()
    found = Mistakes()
    with pytest.raises(UnreadableError):
        read_yaml(tmp_path / name, found)
    ((place, text),) = found.found
    assert place.line == 1 and hint in text
