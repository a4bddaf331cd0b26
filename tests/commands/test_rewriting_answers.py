import pytest
import torch
from transformers import GenerationConfig

from cpt.commands.rewriting_model import Answerer, Sampling, encode

QUESTIONS = ["a", "A longer question about things.", "Why?", "b" * 90, "one two three"]
SEEDS = [1, 2**64 - 1, 3, 4, 5]


def answers(model, tokenizer, batch_size, **sampling):
    answerer = Answerer(model, tokenizer, Sampling(**{"max_new_tokens": 24, **sampling}), batch_size)
    return answerer.answer([encode(tokenizer, question) for question in QUESTIONS], SEEDS)


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
@pytest.mark.parametrize("temperature", [0, 1.3])
def test_many_at_a_time_get_what_each_gets_alone(make_model, tokenizer, model_type, temperature):
    model = make_model(model_type)
    alone = answers(model, tokenizer, 1, temperature=temperature)
    assert (
        answers(model, tokenizer, 5, temperature=temperature)
        == answers(model, tokenizer, 2, temperature=temperature)
        == alone
    )
    assert len({answer.text for answer in alone}) == 5


def greedy(model, ids):
    written = list(ids)
    for _ in range(24):
        written.append(int(model(torch.tensor([written]), use_cache=False).logits[0, -1].argmax()))
    return written[len(ids) :]


def test_greedy_answers_are_the_most_likely_tokens(make_model, tokenizer):
    model = make_model("llama")
    expected = [
        tokenizer.decode(greedy(model, encode(tokenizer, question)), skip_special_tokens=True)
        .replace("\0", "")
        .strip()
        for question in QUESTIONS
    ]
    assert [answer.text for answer in answers(model, tokenizer, 5, temperature=0)] == expected


def test_sampling_follows_the_seed_and_not_torchs_own(make_model, tokenizer):
    model = make_model("llama")
    torch.manual_seed(1)
    first = answers(model, tokenizer, 2, temperature=1.0)
    torch.manual_seed(2)
    assert answers(model, tokenizer, 2, temperature=1.0) == first
    SEEDS.reverse()
    other = answers(model, tokenizer, 2, temperature=1.0)
    SEEDS.reverse()
    assert [one == two for one, two in zip(first, other, strict=True)] == [False, False, True, False, False]


def test_the_models_own_settings_do_not_count(make_model, tokenizer):
    plain, strange = make_model("llama"), make_model("llama")
    strange.generation_config = GenerationConfig(
        do_sample=True, repetition_penalty=5.0, temperature=3.0, max_new_tokens=2, num_beams=3
    )
    assert answers(strange, tokenizer, 2, temperature=0) == answers(plain, tokenizer, 2, temperature=0)


def test_an_answer_ends_at_the_models_own_end_of_turn_and_what_has_not_ended_is_cut_off(make_model, tokenizer):
    model = make_model("llama")
    written = greedy(model, encode(tokenizer, QUESTIONS[0]))
    assert answers(model, tokenizer, 5, temperature=0)[0].is_cut_off
    model.generation_config = GenerationConfig(eos_token_id=[written[9]], do_sample=True, repetition_penalty=5.0)
    ended = answers(model, tokenizer, 5, temperature=0)[0]
    assert (
        not ended.is_cut_off
        and ended.text == tokenizer.decode(written[: written.index(written[9])], skip_special_tokens=True).strip()
    )
