import ast
from pathlib import Path

import pytest

from benchmarks.mutations.__main__ import broken
from benchmarks.mutations.lines import MUTATIONS, Mutation

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda one: f"{one.file}:{one.line.strip()[:40]}")
def test_each_guarded_line_stands_where_the_list_says_and_can_be_broken(mutation):
    changed = broken((ROOT / mutation.file).read_text(), mutation)
    ast.parse(changed)
    assert (ROOT / mutation.tests).is_file()


def test_a_line_that_is_gone_or_stands_twice_is_told():
    mutation = Mutation("", "a.py", "x = 1", "x = 2", "")
    for text, times in (("y = 1\n", 0), ("x = 1\nx = 1\n", 2)):
        with pytest.raises(ValueError, match=f"a.py has {times} times: x = 1"):
            broken(text, mutation)
