"""The table of keys is that of the installed classes, and so are the stages' columns."""

import dataclasses
import json
from dataclasses import replace
from pkgutil import resolve_name
from types import NoneType

import pytest

from cpt.errors import RecipeError
from cpt.plugins import fits
from cpt.recipe import huggingface_keys
from cpt.recipe.huggingface_keys import (
    ANYTHING,
    PEFT_METHODS,
    STAGE_CONFIGS,
    TABLE,
    Key,
    columns_of_stage,
    find_stage,
    keys_of_class,
    keys_of_config,
    written_keys,
)
from cpt.stages.build import TRAINERS

CONFIGS = sorted({*STAGE_CONFIGS.values(), *PEFT_METHODS.values()})
SIMPLE = bool | int | float | list | dict | NoneType


@pytest.mark.parametrize("config", CONFIGS)
def test_the_keys_are_those_of_the_installed_class_and_its_defaults_fit_them(config):
    config_class = resolve_name(config)
    fields = {field.name: field for field in dataclasses.fields(config_class) if field.init}
    keys = keys_of_config(config)
    assert list(keys) == list(fields)
    from_class = keys_of_class(config_class)
    assert keys == {name: replace(key, description="") for name, key in from_class.items()}
    for name, field in fields.items():
        if isinstance(field.default, SIMPLE):
            assert any(fits(field.default, kind) for kind in keys[name].kinds), name


def test_the_table_has_every_class_of_the_tested_versions():
    assert sorted(written_keys()) == CONFIGS, "python -m docs.make_keys"


def test_with_other_versions_the_keys_are_read_from_the_class(tmp_path, monkeypatch):
    table = json.loads(TABLE.read_bytes())
    table["versions"]["trl"] = "0.1"
    for numbers in table["classes"].values():
        numbers.clear()
    other = tmp_path / "keys.json"
    other.write_text(json.dumps(table))
    expected = keys_of_config("trl:DPOConfig")
    for caches in (written_keys, keys_of_config):
        caches.cache_clear()
    monkeypatch.setattr(huggingface_keys, "TABLE", other)
    try:
        assert written_keys() == {} and keys_of_config("trl:DPOConfig").keys() == expected.keys()
    finally:
        for caches in (written_keys, keys_of_config):
            caches.cache_clear()


def test_types_words_and_descriptions_are_read():
    keys = keys_of_config("trl:GRPOConfig")
    assert keys["num_generations"].kinds == {int, NoneType}
    assert keys["learning_rate"].kinds == {float}
    assert keys["save_strategy"] == Key(frozenset({str}), ("no", "steps", "epoch", "best"))
    described = keys_of_class(resolve_name("trl:GRPOConfig"))["save_strategy"].description
    assert "checkpoint" in described
    assert keys["fsdp"].kinds == {bool, str, NoneType}
    assert keys["fsdp_config"].kinds == {dict, str, NoneType}


def test_the_stages_have_the_classes_and_columns_that_we_look_up():
    assert {*STAGE_CONFIGS} == {*TRAINERS}
    for name, config in STAGE_CONFIGS.items():
        assert find_stage(name).CONFIG is resolve_name(config)
        assert columns_of_stage(name) == tuple(find_stage(name).COLUMNS)


def test_a_class_that_yaml_cannot_express_is_left_to_its_owner():
    assert keys_of_config("transformers:TrainingArguments")["parallelism_config"].kinds == ANYTHING


def test_the_columns_of_a_users_stage_may_be_imported_by_it(here):
    (here / "columns_of_lab.py").write_text('COLUMNS = ["prompt", "chosen", "rejected"]\n')
    (here / "my_lab.py").write_text(
        "from columns_of_lab import COLUMNS\nCONFIG = dict\nbuild_trainer = print\n"
    )
    assert columns_of_stage("my_lab") == ("prompt", "chosen", "rejected")


@pytest.mark.parametrize("stage", ["hidden_lab", "nowhere_lab.stage"])
def test_a_stage_without_columns_is_refused(here, stage):
    (here / "hidden_lab.py").write_text("CONFIG = dict\nbuild_trainer = print\n")
    with pytest.raises(RecipeError, match=f"{stage.partition('.')[0]}"):
        columns_of_stage(stage)
