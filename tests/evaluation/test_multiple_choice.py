import pytest
import torch
import torch.nn.functional as F
from tiny import TINY_LLAMA
from transformers import LlamaConfig, LlamaForCausalLM

from cpt.evaluation.domain_test import Question, answer_questions, candidate
from cpt.recipe.schema import Model, Tokenizer
from cpt.tokenizer.load import load_tokenizer

QUESTIONS = [
    Question("cloze", "a:1", "the model reads a document and ", ("learns", "domain", "which", "other"), 2),
    Question(
        "continuation",
        "a:2",
        "the text of its domain comes after",
        (" the other word", " a document", " in", " model learns"),
        0,
    ),
    Question("cloze", "a:3", "a word in ", ("the", "text", "its", "number"), 1),
]


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folder):
    return load_tokenizer(Tokenizer(path=str(tokenizer_folder)), Model(path="unused"))


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**TINY_LLAMA, initializer_range=0.3))


def likeliest_by_hand(model, tokenizer, question):
    scores = []
    for choice in question.choices:
        one = candidate(tokenizer, question.context, choice, 999)
        with torch.no_grad():
            logits = model.eval()(input_ids=torch.tensor([one.ids]), use_cache=False).logits[0]
        wanted = torch.tensor(one.ids[one.first :])
        scores.append(F.cross_entropy(logits[one.first - 1 : -1], wanted, reduction="sum").item() / one.num_bytes)
    return scores.index(min(scores))


@pytest.mark.parametrize("batch_size", [1, 5, 100])
def test_the_answer_is_the_likeliest_choice_by_byte_at_any_batch_size(model, tokenizer, batch_size):
    found = answer_questions(model, tokenizer, QUESTIONS, batch_size=batch_size, longest=128)
    assert found.tolist() == [
        likeliest_by_hand(model, tokenizer, question) == question.answer for question in QUESTIONS
    ]


def test_space_before_a_choice_is_the_choices(tokenizer):
    one = candidate(tokenizer, "the model ", "learns", 99)
    assert (
        tokenizer.decode(one.ids[: one.first], skip_special_tokens=True) == "the model"
        and tokenizer.decode(one.ids[one.first :]) == " learns"
    )
    assert one.num_bytes == len(" learns")


def test_of_a_long_context_the_end_is_read(tokenizer):
    one = candidate(tokenizer, "word " * 50, "learns", 12)
    assert len(one.ids) == 12 and tokenizer.decode(one.ids).endswith("learns")


def test_a_choice_always_costs_something(tokenizer):
    for context in ("the mode", "the model", "the model "):
        one = candidate(tokenizer, context, "l", 99)
        assert one.first < len(one.ids)
