import pytest
from imported_configs import result

from cpt.importing.passing import fitted, kinds_in_words, pass_on
from cpt.recipe.huggingface_keys import keys_of_config

KEYS = keys_of_config("transformers:TrainingArguments")


@pytest.mark.parametrize(
    ("key", "value", "found"),
    [
        ("bf16", "yes", True),
        ("logging_steps", "10", 10),
        ("logging_steps", 10.0, 10),
        ("max_grad_norm", "1e-1", 0.1),
        ("ddp_timeout", "soon", None),
        ("bf16", [1], None),
    ],
)
def test_values_are_given_the_kind_that_the_class_takes(key, value, found):
    assert fitted(value, KEYS[key]) == found


def test_kinds_in_words():
    assert kinds_in_words(KEYS["ddp_timeout"]) == "a whole number"


def test_what_would_do_nothing_is_not_passed_on(axolotl):
    ledger = axolotl(
        group_by_length=True,
        max_grad_norm="0.5",
        ddp_timeout="soon",
        center_rewards_coefficient=0.1,
        torch_compile=None,
    )
    found = result(ledger)
    assert found["max_grad_norm"][0] == "carried" and ledger.recipe["training"]["max_grad_norm"] == 0.5
    assert found["group_by_length"] == (
        "otherwise",
        "rows come in an order that is fixed by the seed, so that a run resumes exactly",
    )
    assert found["ddp_timeout"] == ("not", "`training.ddp_timeout` must be a whole number")
    assert found["center_rewards_coefficient"] == (
        "not",
        "stage `cpt` has no such key in `training:` (TrainingArguments)",
    )
    assert found["torch_compile"] == ("carried", "empty there")


def test_a_key_under_another_name(axolotl):
    ledger = axolotl(rl="dpo", datasets=[{"path": "a/b", "type": "chatml.intel"}], rl_beta=0.3)
    assert ledger.recipe["training"]["beta"] == 0.3 and ledger.comments["training.beta"] == "rl_beta"
    pass_on(ledger, "no_such_key", "beta")
    assert ledger.recipe["training"]["beta"] == 0.3, "a key that is not there changes nothing"
