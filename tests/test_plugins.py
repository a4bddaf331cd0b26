"""Users' own functions: found by name, their options checked, their errors reported as theirs."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import pytest

from cpt.errors import RecipeError, UserCodeError
from cpt.plugins import check_options, find

BUILT_IN = {"adamw": dict, "sgd": list}


@pytest.fixture
def my_lab(tmp_path, monkeypatch):
    """`my_lab("def build(): ...")`: the name of a new module in the current folder."""
    monkeypatch.chdir(tmp_path)

    def write(text):
        (tmp_path / f"lab_of_{tmp_path.name}.py").write_text(text)
        return f"lab_of_{tmp_path.name}"

    return write


def test_a_users_function_is_found_from_where_the_command_was_started(my_lab):
    lab = my_lab("def build(): return 'mine'\n")
    assert find("optimizer", f"{lab}:build", BUILT_IN)() == "mine"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("adamv", "Did you mean `adamw`"),
        ("LAB.build", "Built in"),
        ("LAB:bild", "Did you mean `build`"),
        ("LAB:NUMBER", "function"),
        ("gone_lab:build", "Searched in"),
        ("a/b.py:build", "`package.module:function`"),
    ],
)
def test_what_is_not_found_is_named_with_the_remedy(my_lab, name, said):
    name = name.replace("LAB", my_lab("def build(): return 'mine'\n\nNUMBER = 3\n"))
    with pytest.raises(RecipeError, match=said) as caught:
        find("optimizer", name, BUILT_IN)
    assert name.partition(":")[0] in str(caught.value)


def test_an_import_that_fails_in_a_users_module_is_named(my_lab):
    with pytest.raises(RecipeError, match="nothing_like_this"):
        find("optimizer", f"{my_lab('import nothing_like_this')}:build", BUILT_IN)


def test_an_error_of_a_users_function_names_it_and_keeps_its_traceback(my_lab):
    lab = my_lab("def inner():\n    return 1 / 0\n\ndef build(x, *, rho=1):\n    return inner()\n")
    build = find("optimizer", f"{lab}:build", BUILT_IN)
    check_options(build, {"rho": 2}, "optimizer")
    with pytest.raises(UserCodeError) as error:
        build(1)
    said = str(error.value)
    assert f"optimizer `{lab}:build`" in said.splitlines()[0] and "ZeroDivisionError" in said
    assert f'{lab}.py", line 2' in said and "cpt/plugins.py" not in said


def test_out_of_memory_in_a_users_function_stays_what_it_is(my_lab):
    lab = my_lab("def build():\n    raise RuntimeError('CUDA out of memory.')\n")
    with pytest.raises(RuntimeError, match="CUDA out of memory"):
        find("optimizer", f"{lab}:build", BUILT_IN)()


def build(
    groups: list[Any],
    learning_rate: float,
    *,
    rho: float,
    betas: Sequence[float] = (0.9, 0.95),
    steps: int | None = None,
    mode: Literal["a", "b"] = "a",
    names: Mapping[str, int] = {},
    untyped=None,
) -> None: ...


@pytest.mark.parametrize(
    "options",
    [
        {"rho": 1, "betas": [0, 1.0], "steps": None},
        {"rho": 0.1, "steps": 1e3, "mode": "b", "names": {"a": 1}, "untyped": []},
    ],
)
def test_options_by_name_and_of_their_type_pass(options):
    check_options(build, options, "optimizer")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"roh": 1}, ["`optimizer.roh`", "`rho`"]),
        ({}, ["`optimizer`", "`rho`"]),
        ({"rho": "1"}, ["`optimizer.rho`", "number"]),
        ({"rho": 1, "betas": [0.9, "x"]}, ["`optimizer.betas`", "list"]),
        ({"rho": 1, "steps": 1.5}, ["`optimizer.steps`", "whole", "null"]),
        ({"rho": 1, "mode": "c"}, ["`optimizer.mode`", "a, b"]),
    ],
)
def test_wrong_options_are_refused_before_anything_is_built(options, named):
    with pytest.raises(RecipeError) as caught:
        check_options(build, options, "optimizer")
    assert all(word in str(caught.value) for word in named)


def test_an_argument_that_cpt_itself_gives_is_not_an_option():
    def factor(*, floor: float, total: int) -> None: ...

    check_options(factor, {"floor": 1}, "schedule", passed=["total"])
    with pytest.raises(RecipeError, match="`schedule.total`"):
        check_options(factor, {"floor": 1, "total": 2}, "schedule", passed=["total"])
