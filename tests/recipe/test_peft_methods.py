import pytest

from cpt.recipe.huggingface_keys import PEFT_METHODS, keys_of_config


@pytest.mark.parametrize("name", PEFT_METHODS)
def test_the_options_of_each_method_are_found(name):
    assert {"target_modules", "modules_to_save"} <= keys_of_config(PEFT_METHODS[name]).keys()


@pytest.mark.parametrize(
    ("written", "named"),
    [
        ("{method: lohaa}", "`loha`"),
        ("{method: ia3, r: 8}", "`model.lora.r`"),
        ("{method: boft, boft_block_sise: 4}", "`boft_block_size`"),
        ("{method: oft, preset: cpt}", "`model.lora.preset`"),
        ("{method: oft, quantize: nf4}", "`model.lora.quantize`"),
        ("{method: p_tuning}", "`model.lora.method`"),
    ],
)
def test_options_are_checked_against_the_methods_own_class(mistakes, written, named):
    (line,) = mistakes("", f"model.lora={written}")
    assert named in line
