"""The one door for users' code."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import pytest

from cpt.errors import RecipeError, UserCodeError
from cpt.plugins import check_options, closest, find, import_user_module

BUILT_IN = {"adamw": dict, "sgd": list}


@pytest.fixture
def my_lab(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_lab_of_doors.py").write_text("def build(): return 'mine'\n\nNUMBER = 3\n")
    (tmp_path / "my_broken_lab.py").write_text("import nothing_like_this\n")


def test_an_error_of_a_users_function_names_it_and_keeps_its_traceback(my_lab, tmp_path):
    (tmp_path / "my_failing_lab.py").write_text(
        "def inner():\n    return 1 / 0\n\ndef build(x, *, rho=1):\n    return inner()\n"
    )
    build = find("optimizer", "my_failing_lab:build", BUILT_IN)
    check_options(build, {"rho": 2}, "optimizer")
    with pytest.raises(UserCodeError) as error:
        build(1)
    said = str(error.value)
    assert "optimizer `my_failing_lab:build`" in said.splitlines()[0] and "ZeroDivisionError" in said
    assert f'{tmp_path / "my_failing_lab.py"}", line 2' in said and "extend.py" not in said


def test_lack_of_memory_in_a_users_function_stays_what_it_is(my_lab, tmp_path):
    (tmp_path / "my_large_lab.py").write_text("def build():\n    raise RuntimeError('CUDA out of memory.')\n")
    with pytest.raises(RuntimeError, match="CUDA out of memory"):
        find("optimizer", "my_large_lab:build", BUILT_IN)()


def test_a_built_in_is_found_by_its_name():
    assert find("optimizer", "sgd", BUILT_IN) is list


def test_a_users_function_is_found_from_where_the_command_was_started(my_lab):
    assert find("optimizer", "my_lab_of_doors:build", BUILT_IN)() == "mine"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "adamv",
            (
                "no optimizer called `adamv`. Did you mean `adamw`? Built in: adamw, sgd. Your own:"
                " `package.module:function`."
            ),
        ),
        ("my_lab_of_doors.build", "no optimizer called `my_lab_of_doors.build`. Built in:"),
        ("my_lab_of_doors:bild", "`my_lab_of_doors` has no `bild`. Did you mean `build`?"),
        ("my_lab_of_doors:NUMBER", "`my_lab_of_doors:NUMBER` is a int, but a function is needed for the optimizer."),
        ("gone_lab:build", "cannot import `gone_lab`: No module named 'gone_lab'. It is looked for in "),
        ("my_broken_lab:build", "cannot import `my_broken_lab`: No module named 'nothing_like_this'."),
        ("a/b.py:build", "`a/b.py:build`: write it as `package.module:function`."),
    ],
)
def test_what_is_not_found_is_told_with_the_remedy(my_lab, name, said):
    with pytest.raises(RecipeError) as caught:
        find("optimizer", name, BUILT_IN)
    assert str(caught.value).startswith(said)


def build(
    groups: list[Any],
    learning_rate: float,
    *,
    rho: float,
    betas: Sequence[float] = (0.9, 0.95),
    steps: int | None = None,
    nesterov: bool = False,
    mode: Literal["a", "b"] = "a",
    names: Mapping[str, int] = {},
    untyped=None,
) -> None: ...


@pytest.mark.parametrize(
    "options",
    [
        {"rho": 1},
        {"rho": 0.1, "betas": [0, 1.0]},
        {"rho": 1, "steps": None},
        {"rho": 1, "steps": 1e3},
        {"rho": 1, "mode": "b", "names": {"a": 1}, "untyped": []},
    ],
)
def test_options_by_name_and_of_their_type_pass(options):
    check_options(build, options, "optimizer")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"roh": 1}, "`optimizer.roh` `rho`"),
        ({"learnin_rate": 1}, "`optimizer.learnin_rate` `learning_rate`"),
        ({"groups": []}, "`optimizer.groups`"),
        ({}, "`optimizer` `rho`"),
        ({"rho": "1"}, "`optimizer.rho`: number"),
        ({"rho": 1, "betas": [0.9, "x"]}, "`optimizer.betas`: list"),
        ({"rho": 1, "steps": 1.5}, "`optimizer.steps`: whole null"),
        ({"rho": 1, "mode": "c"}, "`optimizer.mode`: a, b"),
        ({"rho": 1, "names": []}, "`optimizer.names`: keys"),
    ],
)
def test_wrong_options_are_told_before_anything_is_built(options, named):
    with pytest.raises(RecipeError) as caught:
        check_options(build, options, "optimizer")
    assert all(word in str(caught.value) for word in named.split(" "))


def test_options_that_nobody_could_check_are_refused():
    with pytest.raises(RecipeError, match="takes \\*\\*kwargs, so its options cannot be checked"):
        check_options(lambda **options: None, {}, "filter")


def test_what_cpt_itself_gives_is_no_option():
    def factor(*, floor: float, total: int) -> None: ...

    check_options(factor, {"floor": 1}, "schedule", given=["total"])
    with pytest.raises(RecipeError, match="`schedule.total` is not an option"):
        check_options(factor, {"floor": 1, "total": 2}, "schedule", given=["total"])


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("lerning_rate", "learning_rate"),
        ("Learning-Rate", "learning_rate"),
        ("sede", "seed"),
        ("xyz", None),
    ],
)
def test_the_closest_choice_is_what_was_meant(name, meant):
    assert closest(name, ["seed", "learning_rate", "tags", "r"]) == meant


def test_what_the_users_module_raises_itself_is_not_hidden(tmp_path, monkeypatch):
    (tmp_path / "module_that_raises.py").write_text("raise ValueError('of its own')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ValueError, match="of its own"):
        import_user_module("module_that_raises")
