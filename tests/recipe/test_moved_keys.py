"""Every key that is written elsewhere leads to a place that exists."""

import pytest

from cpt.recipe.huggingface_keys import keys_of_config
from cpt.recipe.moved_keys import MOVED, UNITS, new_home
from cpt.recipe.sections import all_keys

OPTIONS_OF_BUILT_INS = {("optimizer", "weight_decay"), ("optimizer", "betas"), ("optimizer", "eps"), ("schedule", "warmup_tokens")}


@pytest.mark.parametrize("key", MOVED)
def test_the_new_place_exists(key):
    place = MOVED[key]
    if place[0] == "training":
        assert place[1] in keys_of_config("transformers:TrainingArguments")
    else:
        assert place in {*all_keys(), *OPTIONS_OF_BUILT_INS}


def test_the_new_place_is_told_with_its_unit():
    assert new_home("warmup_ratio") == "`schedule.warmup_tokens` (in tokens: ratio x budget.tokens)"
    assert new_home("seed") == "`seed`" and {*UNITS} <= {*MOVED}
