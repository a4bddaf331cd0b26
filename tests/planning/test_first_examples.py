"""What a start would refuse is told by `cpt check`, from the first example of each source."""

import pytest
from tiny_tasks import TINY
from transformers import AutoTokenizer

from cpt.planning.check_model import check_first_examples
from cpt.planning.check_resources import PreflightReport
from cpt.recipe.load import load_recipe


def mistakes_of(stage, *overrides, template=True):
    found = PreflightReport()
    tokenizer = AutoTokenizer.from_pretrained(TINY / "tokenizer")
    if not template:
        tokenizer.chat_template = None
    check_first_examples(load_recipe(TINY / f"{stage}.yaml", overrides), tokenizer, found)
    return [str(mistake) for mistake in found.mistakes]


@pytest.mark.parametrize("stage", ["sft", "dpo", "kto", "grpo"])
def test_the_tiny_recipes_have_what_they_need(stage):
    assert mistakes_of(stage) == []


def test_messages_need_a_chat_template():
    (mistake,) = mistakes_of("dpo", template=False)
    assert "`tokenizer.path`: the data has messages, and the tokenizer has no chat template" in mistake
    assert mistakes_of("grpo", template=False) == []  # its prompts are plain texts


def test_a_column_that_a_reward_reads_has_to_be_there():
    (mistake,) = mistakes_of("grpo", "rewards=[{name: exact_match, column: solution}]")
    assert "`rewards[0]`" in mistake and "`solution`" in mistake and "answer" in mistake
