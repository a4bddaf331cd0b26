"""The key tables and columns, read from sources without importing them, are those of the real classes."""

import dataclasses
import importlib
import sys
from types import NoneType

import pytest

from cpt.errors import RecipeError, ResourceError
from cpt.plugins import fits
from cpt.recipe.huggingface_keys import (
    ANYTHING,
    STAGE_CONFIGS,
    columns_of_stage,
    find_stage,
    keys_of_config,
)
from cpt.stages.build import TRAINERS

CONFIGS = sorted({"transformers:TrainingArguments", "peft:LoraConfig", *STAGE_CONFIGS.values()})
SIMPLE = bool | int | float | list | dict | NoneType


def real_class(config: str) -> type:
    module, _, name = config.partition(":")
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("config", CONFIGS)
def test_the_keys_are_those_of_the_real_class_and_its_defaults_fit_them(config):
    keys = keys_of_config(config)
    fields = {field.name: field for field in dataclasses.fields(real_class(config)) if field.init}
    assert keys.keys() == fields.keys()
    for name, field in fields.items():
        assert not isinstance(field.default, SIMPLE) or any(
            fits(field.default, kind) for kind in keys[name].kinds
        ), name


def test_the_stages_have_the_classes_and_columns_that_we_look_up():
    assert {*STAGE_CONFIGS} == {*TRAINERS}
    for name, config in STAGE_CONFIGS.items():
        assert find_stage(name).CONFIG is real_class(config)
        assert columns_of_stage(name) == tuple(find_stage(name).COLUMNS)


def test_a_class_that_yaml_cannot_express_is_left_to_its_owner():
    assert keys_of_config("transformers:TrainingArguments")["parallelism_config"].kinds == ANYTHING


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (
            "from elsewhere_entirely import Base\n\nclass Config(Base): pass\n",
            "`elsewhere_entirely`",
        ),
        ("from json import Missing\n\nclass Config(Missing): pass\n", "`Missing`"),
        ("def broken(:\n", "cannot read"),
    ],
)
def test_a_source_that_cannot_be_followed_is_an_error_and_never_an_empty_table(here, source, said):
    (here / "my_lab.py").write_text(source)
    with pytest.raises(ResourceError, match=said):
        keys_of_config("my_lab:Config")


def test_the_columns_of_a_users_stage_are_found_where_it_imports_them_from(here):
    (here / "own_lab_parts.py").write_text('COLUMNS = ("prompt", "chosen", "rejected")\n')
    (here / "own_lab.py").write_text(
        "from own_lab_parts import COLUMNS\nraise AssertionError('imported')\n"
    )
    assert (
        columns_of_stage("own_lab") == ("prompt", "chosen", "rejected")
        and "own_lab" not in sys.modules
    )


@pytest.mark.parametrize("stage", ["hidden", "nowhere_lab.stage"])
def test_a_stage_whose_columns_cannot_be_read_is_refused(here, stage):
    (here / "hidden.py").write_text("COLUMNS = tuple('abc')\n")
    with pytest.raises(RecipeError, match=f"`stage`: .*{stage.partition('.')[0]}"):
        columns_of_stage(stage)
