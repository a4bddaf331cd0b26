import os

import pytest

from cpt.errors import RecipeError
from cpt.importing.config import MAX_BYTES, kind_of, read_config

KNOWN = {
    "axolotl": {"base_model", "datasets", "learning_rate"},
    "llamafactory": {"model_name_or_path", "template", "learning_rate"},
}
NEEDED = {"axolotl": "base_model", "llamafactory": "model_name_or_path"}


def config(tmp_path, text):
    path = tmp_path / "c.yml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_config(path)


def test_values_are_read_as_the_tools_read_them(tmp_path):
    found = config(tmp_path, "a: no\n# one\nlearning_rate: 1e-5\nb:\nc: {d: [1]}\n")
    assert found.values == {"a": False, "learning_rate": "1e-5", "b": None, "c": {"d": [1]}}
    assert found.lines["learning_rate"] == 3


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "the file is empty"),
        ("# nothing\n", "the file is empty"),
        ("- a\n- b\n", "got a list"),
        ("word", "got a single value"),
        ("a: [1\nb: 2\n", r"c.yml:\d: not YAML"),
        ("a: !!python/object:os.system x\n", r"c.yml:1: not YAML"),
        ("a: 1\nb: \x07\n", "c.yml:2: not YAML: unacceptable character"),
        (b"\x80\x02PK\xff\x00", r"c.yml:1: not UTF-8 text: byte 0x80"),
        (b"a: 1\nb: \xff\n", r"c.yml:2: not UTF-8 text"),
        ("a: 1\nb: 2\na: 3\n", r"c.yml:3: `a` is written twice, first in line 1"),
        ("a:\n  - b: 1\n    b: 2\n", r"c.yml:3: `b` is written twice, first in line 2"),
        ("a: {b: {c: 1, c: 2}}\n", r"c.yml:1: `c` is written twice"),
        ("a: 2024-13-99\n", "not YAML"),
        ("a: " + "[" * 400 + "]" * 400, "nested too deeply|too large"),
        (
            "a: &x [1, 1, 1, 1]\nb: &y [*x, *x, *x, *x, *x]\nc: &z [*y, *y, *y, *y, *y]\nd: [" + "*z, " * 200 + "]",
            "too large for a config",
        ),
        ("a: &x [*x]\n", "too large for a config"),
        ("a: " + "b" * MAX_BYTES, "bytes: too large"),
        ("name: x\nmodel: {path: a}\ndata: {}\nbudget: {}\n", "is a recipe of cpt already. Check it: cpt check"),
    ],
)
def test_what_is_no_config_is_refused(tmp_path, text, said):
    with pytest.raises(RecipeError, match=said):
        config(tmp_path, text)


def test_files_that_cannot_be_read(tmp_path, monkeypatch):
    with pytest.raises(RecipeError, match="no such file"):
        read_config(tmp_path / "none.yml")
    with pytest.raises(RecipeError, match="is a folder"):
        read_config(tmp_path)
    os.mkfifo(tmp_path / "locked.yml")
    monkeypatch.setattr(
        "pathlib.Path.open", lambda *_: (_ for _ in ()).throw(PermissionError(13, "Permission denied"))
    )
    with pytest.raises(RecipeError, match="cannot be read: Permission denied"):
        read_config(tmp_path / "locked.yml")


def test_the_tool_is_told_by_the_keys_that_only_it_has(tmp_path):
    assert kind_of(config(tmp_path, "datasets: x\nlearning_rate: 1\n"), KNOWN, NEEDED) == "axolotl"
    assert kind_of(config(tmp_path, "template: x\n"), KNOWN, NEEDED) == "llamafactory"


def test_keys_that_a_tool_borrows_do_not_hide_whose_config_it_is(tmp_path):
    assert kind_of(config(tmp_path, "base_model: x\ntemplate: y\n"), KNOWN, NEEDED) == "axolotl"
    assert kind_of(config(tmp_path, "model_name_or_path: x\ndatasets: y\n"), KNOWN, NEEDED) == "llamafactory"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "learning_rate: 1\nother: 2\n",
            "keys of neither axolotl nor llamafactory: learning_rate, other. Say whose they are: --from",
        ),
        (
            "base_model: x\nmodel_name_or_path: y\n",
            r"mixes keys of two tools: base_model \(axolotl\); model_name_or_path \(llamafactory\)",
        ),
        ("model: x\ntrain_dataset: y\n", "is of LLaMA-Factory's v1, whose keys are others"),
    ],
)
def test_a_config_of_neither_or_both_is_refused(tmp_path, text, said):
    with pytest.raises(RecipeError, match=said):
        kind_of(config(tmp_path, text), KNOWN, NEEDED)
