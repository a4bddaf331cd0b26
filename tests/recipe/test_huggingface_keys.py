"""The key tables, read from the source, are those of the real classes."""

import dataclasses
import importlib
from types import NoneType

import pytest

from cpt.errors import ResourceError
from cpt.plugins import fits
from cpt.recipe.huggingface_keys import ANYTHING, STAGE_CONFIGS, keys_of_config
from cpt.stages.build import TRAINERS
from cpt.training.arguments import find_stage

CONFIGS = [
    "transformers:TrainingArguments",
    "trl:SFTConfig",
    "trl:DPOConfig",
    "trl:KTOConfig",
    "trl:RewardConfig",
    "trl:GRPOConfig",
    "trl:RLOOConfig",
    "trl:DistillationConfig",
    "peft:LoraConfig",
]


def real_class(config: str) -> type:
    module, _, name = config.partition(":")
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("config", CONFIGS)
def test_the_keys_are_those_of_the_real_class(config):
    assert {*keys_of_config(config)} == {field.name for field in dataclasses.fields(real_class(config)) if field.init}


@pytest.mark.parametrize("config", CONFIGS)
def test_every_default_fits_its_kinds(config):
    keys = keys_of_config(config)
    for field in dataclasses.fields(real_class(config)):
        if (
            field.init
            and isinstance(field.default, bool | int | float | str | list | dict | NoneType)
            and not isinstance(field.default, str)
        ):
            assert any(fits(field.default, kind) for kind in keys[field.name].kinds), field.name


def test_a_class_nobody_can_write_in_yaml_is_left_to_its_owner():
    assert keys_of_config("transformers:TrainingArguments")["parallelism_config"].kinds == ANYTHING


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (
            "from elsewhere_entirely import Base\n\nclass Config(Base): pass\n",
            "the package `elsewhere_entirely` is not installed",
        ),
        ("from json import Missing\n\nclass Config(Missing): pass\n", "cannot find `Missing`, the base of Config in "),
        ("def broken(:\n", "cannot read "),
    ],
)
def test_a_source_that_cannot_be_followed_is_an_error_and_never_an_empty_table(tmp_path, monkeypatch, source, said):
    monkeypatch.chdir(tmp_path)
    name = f"lab{abs(hash(source))}"
    (tmp_path / f"{name}.py").write_text(source)
    with pytest.raises(ResourceError, match=said.replace("lab", "lab.*")):
        keys_of_config(f"{name}:Config")


FORMS = """
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Optional, Union

@dataclass
class Base:
    one: int = 3
    two: "float | None" = None

@dataclass
class Config(Base):
    one: str = "x"
    three: Optional[list[str]] = field(default=None, metadata={"help": "Three " "things."})
    four: Union[int, dict[str, int]] = 1
    five: Literal["a", 1, None] = "a"
    six: tuple[int, int] = (1, 2)
    seven: int = None
    hidden: int = field(default=3, init=False)
    shared: ClassVar[int] = 3

    def method(self): ...
"""


def test_annotations_of_every_form_are_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "forms_of_annotations.py").write_text(FORMS)
    keys = keys_of_config("forms_of_annotations:Config")
    assert {name: set(key.kinds) for name, key in keys.items()} == {
        "one": {str},
        "two": {float, NoneType},
        "three": {list, NoneType},
        "four": {int, dict},
        "five": {str, int, NoneType},
        "six": {list},
        "seven": {int, NoneType},
    }
    assert keys["three"].description == "Three things."


def test_the_stages_have_the_classes_that_we_look_them_up_in():
    assert {*STAGE_CONFIGS} == {*TRAINERS}
    for name, config in STAGE_CONFIGS.items():
        assert find_stage(name).CONFIG is real_class(config)
