import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpt.importing.writing import in_line, recipe_text
from cpt.recipe.tree import Mistakes, plain
from cpt.recipe.yaml_lines import read_text

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**9), 10**9)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda child: st.lists(child, max_size=3) | st.dictionaries(st.text(), child, max_size=3),
    max_leaves=8,
)


@given(VALUES)
def test_a_line_says_the_value(value):
    mistakes = Mistakes()
    found = plain(read_text(f"key: {in_line(value)}\n".encode("utf-8", "surrogatepass"), "x", mistakes))["key"]
    mistakes.raise_if_any()
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "written"),
    [("a/b-c.jsonl", "a/b-c.jsonl"), ("no", '"no"'), ("1e-5", '"1e-5"'), ("a: b", '"a: b"'), ("", '""')],
)
def test_words_are_bare_where_they_can_be(text, written):
    assert in_line(text) == written


def test_values_stand_with_the_key_that_they_had(axolotl):
    ledger = axolotl(sequence_len=1024, learning_rate="1e-5", wandb_entity="me")
    lines = recipe_text(ledger).splitlines()
    assert f"#   cpt import {ledger.config.path}" in lines[:5], "what can be typed, with its folder"
    assert "  sequence_length: 1024  # sequence_len" in lines and "  learning_rate: 1e-5" in lines
    assert "  path: example/base  # base_model" in lines and "    - path: example/texts" in lines
