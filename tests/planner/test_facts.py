from planned_setups import SHAPES

from cpt.models.config import config_from
from cpt.planner.facts import facts_of


def test_the_parts_of_a_model_are_counted():
    facts = facts_of(config_from(SHAPES["llama"]), None, 512)
    layer = 512 * 512 * 2 + 512 * 256 * 2 + 3 * 512 * 1408 + 2 * 512
    assert facts.head == facts.embedding == 16_000 * 512 and not facts.is_tied
    assert facts.parameters == facts.trained == 2 * facts.head + 4 * layer + 512
    assert facts.largest_matrix == facts.head and facts.largest_layer == max(layer, facts.head)


def test_adapters_train_little_and_a_tied_head_is_one():
    facts = facts_of(config_from(SHAPES["qwen3"]), {"r": 4}, 512)
    assert facts.is_tied and facts.trained < 0.05 * facts.parameters
