import threading

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cpt.errors import CheckpointError, DataError, LaunchError
from cpt.serving.answering import Answers, Sampling, prompt_ids, sampling_of
from cpt.serving.sides import Side

GREEDY = Sampling(temperature=0, max_new_tokens=12)
READS = [{"role": "user", "content": "the model reads"}]


@pytest.fixture
def answers():
    made = Answers()
    yield made
    made.close()


def side_of(folder):
    return Side(
        "Model",
        str(folder),
        AutoModelForCausalLM.from_pretrained(folder).eval(),
        AutoTokenizer.from_pretrained(folder),
        128,
    )


@pytest.fixture(scope="module")
def plain(plain_folder):
    return side_of(plain_folder)


@pytest.fixture(scope="module")
def chat(chat_folder):
    return side_of(chat_folder)


def last(stream):
    return list(stream)[-1]


def test_the_answer_is_what_generate_writes_and_comes_in_parts(plain, answers):
    parts = list(answers.stream(plain, READS, GREEDY, threading.Event()))
    ids = plain.tokenizer("the model reads", return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        written = plain.model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12)
    assert parts[-1] == plain.tokenizer.decode(written[0, ids.shape[1] :], skip_special_tokens=True)
    assert len(parts) > 1 and all(later.startswith(earlier) for earlier, later in zip(parts, parts[1:], strict=False))


def test_the_same_seed_gives_the_same_answer_and_another_seed_another(plain, answers):
    texts = [last(answers.stream(plain, READS, Sampling(1.0, 1.0, 20, seed), threading.Event())) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_a_conversation_is_put_into_the_models_template_and_of_a_text_only_the_last_turn_counts(chat, plain):
    turns = [*READS, {"role": "assistant", "content": "a word"}, {"role": "user", "content": "which"}]
    assert "a word" in chat.tokenizer.decode(prompt_ids(chat, turns, as_chat=True, system_prompt="be short")[0])
    assert "be short" in chat.tokenizer.decode(prompt_ids(chat, turns, as_chat=True, system_prompt="be short")[0])
    for side, as_chat in ((plain, True), (chat, False)):
        assert (
            side.tokenizer.decode(prompt_ids(side, turns, as_chat=as_chat)[0]) == plain.tokenizer.bos_token + "which"
        )


def test_an_answer_ends_at_the_token_after_it_was_stopped(plain, answers):
    stopped, told = threading.Event(), []
    for text in answers.stream(plain, READS, Sampling(0, 1, 100), stopped):
        told.append(text)
        stopped.set()
    whole = last(answers.stream(plain, READS, Sampling(0, 1, 100), threading.Event()))
    assert len(told[-1]) < len(whole)


def test_an_answer_that_nobody_listens_to_any_more_does_not_hold_up_the_next(plain, answers):
    calls = []
    with_counter = plain.model.register_forward_pre_hook(lambda *_: calls.append(1))
    stream = answers.stream(plain, READS, Sampling(0, 1, 100), threading.Event())
    next(stream)
    stream.close()
    assert last(answers.stream(plain, READS, GREEDY, threading.Event()))
    with_counter.remove()
    assert len(calls) < 100


def test_an_answer_goes_no_further_than_the_positions_that_the_model_knows(plain, answers):
    length = prompt_ids(plain, READS, as_chat=False).shape[1]
    few = Side(plain.title, plain.name, plain.model, plain.tokenizer, positions=length + 5)
    calls = []
    counting = plain.model.register_forward_pre_hook(lambda *_: calls.append(1))
    list(answers.stream(few, READS, Sampling(0, 1, 100), threading.Event()))
    counting.remove()
    assert len(calls) == 5


def test_a_text_that_leaves_no_room_is_refused_with_both_lengths(plain, answers):
    with pytest.raises(DataError, match=r"the text has \d+ tokens, and the model knows 2 positions"):
        list(answers.stream(Side("M", "m", plain.model, plain.tokenizer, 2), READS, GREEDY, threading.Event()))


def test_a_model_that_fails_is_told_and_the_next_answer_comes(plain, answers):
    def fail(*_):
        raise RuntimeError("out of memory")

    failing = plain.model.register_forward_pre_hook(fail)
    with pytest.raises(CheckpointError, match="could not answer: out of memory. Ask for fewer tokens, or clear."):
        list(answers.stream(plain, READS, GREEDY, threading.Event()))
    failing.remove()
    assert last(answers.stream(plain, READS, GREEDY, threading.Event()))


def test_a_template_that_refuses_the_turns_is_told(chat, answers):
    template, chat.tokenizer.chat_template = (
        chat.tokenizer.chat_template,
        "{{ raise_exception('roles must alternate') }}",
    )
    try:
        with pytest.raises(DataError, match="does not take this conversation: roles must alternate. Clear it."):
            list(answers.stream(chat, READS, GREEDY, threading.Event(), as_chat=True))
    finally:
        chat.tokenizer.chat_template = template


def test_the_page_begins_with_the_words_of_the_command_line():
    assert sampling_of(["max_new_tokens=200", "seed=3", "top_p=0.5"]) == Sampling(0.7, 0.5, 200, 3)
    assert sampling_of(["temperature=1.2", "do_sample=False"]).temperature == 0


@pytest.mark.parametrize("word", ["num_beams=4", "max_new_tokens=many", "do_sample=perhaps"])
def test_a_word_that_the_page_has_no_control_for_is_refused(word):
    with pytest.raises(
        LaunchError, match="is nothing that the page can begin with. It takes: temperature=0.7 top_p=0.95"
    ):
        sampling_of([word])
