"""The page without a browser: through Gradio's own client, over HTTP."""

import socket
import urllib.request

import pytest
from gradio_client import Client

from cpt.serving.answering import Answers, Sampling
from cpt.serving.browser import page_at
from cpt.serving.chat import free_port
from cpt.serving.page import (
    ENDED_AT_ONCE,
    About,
    Conversation,
    Stops,
    answered,
    plain,
    told_of_templates,
    without_last,
)
from cpt.serving.sides import Side, load_sides

LOOPBACK = ("127.0.0.1", "::1", "localhost", "0.0.0.0")


@pytest.fixture(scope="module")
def reached():
    """The address of each connection that Python makes while the page is served."""
    return []


@pytest.fixture(scope="module")
def client(plain_folder, chat_folder, reached):
    connect = socket.socket.connect

    def recorded(self, address):
        if self.family != socket.AF_UNIX:
            reached.append(address[0])
        return connect(self, address)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(socket.socket, "connect", recorded)
        with page_at(load_sides(str(chat_folder), str(plain_folder)), port=free_port()) as url:
            yield Client(url, verbose=False)


def ask(client, text, talks=((), ()), temperature=0, length=8, seed=0, as_chat=False):
    return client.predict(text, *map(list, talks), temperature, 0.9, length, seed, as_chat, api_name="/send")


def test_both_sides_answer_the_same_prompt(client):
    *talks, problem, prompt = ask(client, "the model reads")
    assert (problem, prompt) == ("", "")
    for turns in map(plain, talks):
        assert [turn["role"] for turn in turns] == ["user", "assistant"]
        assert turns[0]["content"] == "the model reads" and turns[1]["content"]


def test_answers_stream(client):
    job = client.submit("the model reads", [], [], 0, 0.9, 30, 0, False, api_name="/send")
    lengths = [len(plain(talks[0])[-1]["content"]) for talks in job]
    assert len(set(lengths)) > 3


def test_indentation_and_line_breaks_stay_as_they_are(client):
    text = "    the model\n        reads\n"
    *talks, _, _ = ask(client, text)
    assert plain(talks[0])[0]["content"] == text
    written = plain(talks[0])[1]["content"]
    *again, _, _ = ask(client, text, talks)
    assert [turn["content"] for turn in plain(again[0])] == [text, written] * 2


def test_retry_answers_the_last_prompt_with_the_next_seed(client):
    *talks, _, _ = ask(client, "the model reads")
    *again, problem, seed = client.predict(*talks, 1.0, 1.0, 8, 3, False, api_name="/retry")
    assert (problem, seed) == ("", 4)
    for before, after in zip(talks, again, strict=True):
        assert plain(after)[0] == plain(before)[0] and len(after) == 2 and plain(after)[1] != plain(before)[1]


def test_what_goes_wrong_is_told_in_the_page_and_the_prompt_stays(client):
    *_, problem, prompt = ask(client, "the model reads a document " * 60)
    assert "tokens, and the model knows 128 positions. Shorten it" in problem and prompt.startswith("the model reads")
    assert "write something" in ask(client, "")[2]


def test_python_speaks_to_no_other_machine(client, reached):
    ask(client, "the model reads")
    assert reached and set(reached) <= set(LOOPBACK)


def test_the_page_names_no_font_or_script_of_another_machine(client):
    address = client.src if isinstance(client.src, str) else str(client.src)
    text = urllib.request.urlopen(address).read().decode()
    css = urllib.request.urlopen(address.rstrip("/") + "/theme.css").read().decode()
    assert "fonts.googleapis.com" not in text + css and "cdn" not in css
    assert 'src="http' not in text and 'rel="preconnect"' not in text


def test_a_template_is_used_where_there_is_one_and_it_is_asked_for(client):
    answers = [
        [plain(turns)[1]["content"] for turns in ask(client, "the model reads", as_chat=as_chat)[:2]]
        for as_chat in (False, True)
    ]
    assert answers[0][0] == answers[1][0] and answers[0][1] != answers[1][1]  # only the trained side has one


def test_the_page_says_who_only_continues_text(plain_folder, chat_folder):
    (text,), (chat,) = load_sides(str(plain_folder)), load_sides(str(chat_folder))
    base = Side("Base", "b", text.model, text.tokenizer, 128)
    assert told_of_templates([text]).startswith(
        "This model has no chat template: text is continued, questions are not answered."
    )
    assert told_of_templates([base, chat]).startswith("Base has no chat template: text is continued")
    assert told_of_templates([base, chat]).endswith("It gets the last message alone, chat or not.")
    assert "has never learned it" in told_of_templates([chat])


def test_a_prompt_that_was_stopped_before_its_answer_is_not_sent_again():
    first, answer, second = (
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    )
    assert answered([first, answer, second]) == [first, answer] and answered([first, second, answer]) == [
        second,
        answer,
    ]
    assert answered([]) == answered([first]) == []


def test_an_answer_that_ends_at_once_is_told_and_no_part_of_what_the_model_gets_next(chat_folder):
    (side,) = load_sides(str(chat_folder))
    ends = side.model.generation_config.eos_token_id

    def end(module, arguments, output):
        output.logits[..., ends] = 1e4

    side.model.register_forward_hook(end)
    answers = Answers()
    conversation = Conversation([side], About("chat"), answers, Stops())
    *_, (shown, problem) = conversation.send(None, "the model reads", [[]], Sampling(temperature=0), True)
    answers.close()
    assert (shown[0][-1], problem) == ({"role": "assistant", "content": ENDED_AT_ONCE}, "")
    assert answered(shown[0]) == [shown[0][0], {"role": "assistant", "content": ""}]


def test_retry_finds_the_last_prompt_even_where_nothing_was_said():
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    assert without_last([said, said[:2]]) == ([said[:2], []], "c")
    assert without_last([[], []]) == ([[], []], "")
