import dataclasses

import pytest
from peft import PeftType
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

from cpt.errors import RecipeError
from cpt.recipe.huggingface_keys import keys_of_config
from cpt.recipe.peft_methods import UNFIT, config_of_method, method_of, peft_methods, takes_4_bit


def test_the_sources_tell_the_methods_that_peft_has():
    assert {name.upper() for name in peft_methods()} == {kind.value for kind in PEFT_TYPE_TO_CONFIG_MAPPING}
    assert peft_methods().keys() >= UNFIT.keys()


@pytest.mark.parametrize("name", peft_methods())
def test_each_methods_keys_are_those_of_its_class(name):
    real = PEFT_TYPE_TO_CONFIG_MAPPING[PeftType(name.upper())]
    assert keys_of_config(peft_methods()[name]).keys() == {
        field.name for field in dataclasses.fields(real) if field.init
    }


def test_a_method_is_lora_unless_said_and_its_case_does_not_matter():
    assert method_of({"r": 8}) == "lora" and config_of_method({}) == "peft.tuners.lora:LoraConfig"
    assert config_of_method({"method": "IA3"}) == "peft.tuners.ia3:IA3Config"


def test_methods_with_layers_for_4_bit():
    assert {name for name in ("lora", "ia3", "road", "loha", "oft") if takes_4_bit(name)} == {"lora", "ia3", "road"}


@pytest.mark.parametrize("name", UNFIT)
def test_a_method_that_no_run_can_train_is_refused_with_its_reason(name):
    with pytest.raises(RecipeError, match=f"{name} cannot be trained here: "):
        config_of_method({"method": name})


@pytest.mark.parametrize(
    ("written", "named"),
    [
        ("{method: lohaa}", "`loha`"),
        ("{method: ia3, r: 8}", "`model.lora.r`"),
        ("{method: boft, boft_block_sise: 4}", "`boft_block_size`"),
        ("{method: vera, r: many}", "`model.lora.r`"),
        ("{method: oft, preset: cpt}", "`model.lora.preset`"),
        ("{method: oft, quantize: nf4}", "`model.lora.quantize`"),
        ("{method: p_tuning}", "`model.lora.method`"),
    ],
)
def test_options_are_checked_against_the_methods_own_class_with_their_line(mistakes, written, named):
    (line,) = mistakes("", f"model.lora={written}")
    assert named in line
