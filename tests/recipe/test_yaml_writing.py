"""What we write, we read back; other readers of YAML 1.1 do too."""

import pytest
import yaml

from cpt.recipe.tree import Mistakes, plain, read_text
from cpt.recipe.values import write_yaml


@pytest.mark.parametrize(
    "text",
    ["no", "yes", "1e-4", "010", "1:30", "2024-01-01", "null", "", "<<", "1_000", ".inf", "0x1f", "0o17", "=", "a: b"],
)
def test_text_that_looks_like_something_else_stays_text(text):
    written = write_yaml({"a": text})
    assert plain(read_text(written.encode(), "x", Mistakes())) == {"a": text}
    assert yaml.safe_load(written) == {"a": text}


@pytest.mark.parametrize(
    ("value", "written"), [(1e-5, "1e-5"), (0.1, "0.1"), (3, "3"), (True, "true"), (None, "null"), ("no", "'no'")]
)
def test_values_are_written_as_people_write_them(value, written):
    assert write_yaml({"a": value}) == f"a: {written}\n"


def test_shared_values_are_written_out():
    shared = {"x": [1]}
    assert write_yaml({"a": shared, "b": shared}) == "a:\n  x:\n  - 1\nb:\n  x:\n  - 1\n"


def test_keys_keep_their_order():
    assert list(yaml.safe_load(write_yaml({"z": 1, "a": 2}))) == ["z", "a"]
