"""What `cpt data rewrite --endpoint` does with servers that answer otherwise than the protocol says."""

import json
import logging
import re
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Thread

import pytest

from cpt.contrib.rewriting import model as rewriting_model
from cpt.contrib.rewriting.model import Endpoint, Sampling, UnreadableAnswerError, read_answer
from cpt.contrib.rewriting.rewrite import Task, rewrite
from cpt.contrib.rewriting.styles import find_styles
from cpt.errors import DataError, Interrupted, LaunchError
from cpt.recipe.schema import DocumentSource

WORDS = [
    "harbour",
    "ledger",
    "ferry",
    "lantern",
    "tide",
    "captain",
    "evening",
    "signal",
    "rope",
    "anchor",
]


def prose(number):
    """A text that no other number has."""
    words = [
        WORDS[(number * 7 + place * (number + 3)) % len(WORDS)] + f"{number}x{place}"
        for place in range(20)
    ]
    return "The " + " ".join(words) + "."


def completion(content, reason="stop", **message):
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": content, **message},
        "finish_reason": reason,
    }
    return {"model": "served", "choices": [choice]}


class Server:
    """`respond(number, asked)` gives the status and the body of each call, or only the seconds of a pause."""

    def __init__(self, respond):
        self.calls, lock, server = 0, Lock(), self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    server.calls += 1
                    response = respond(server.calls, asked)
                if isinstance(response, float):
                    time.sleep(response)
                    return
                status, body = response
                raw = (body if isinstance(body, str) else json.dumps(body)).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

            def log_message(self, *words):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"


@pytest.fixture
def corpus(tmp_path):
    lines = [
        json.dumps({"text": f"Report {number} of the mill at Oberau."}) + "\n"
        for number in range(20)
    ]
    (tmp_path / "corpus.jsonl").write_text("".join(lines))
    return tmp_path / "corpus.jsonl"


@pytest.fixture
def ask(corpus, tmp_path, monkeypatch):
    """`ask(respond)`: the counts, the rows and the server of a run with these responses."""
    monkeypatch.setattr(rewriting_model, "PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(rewriting_model, "LONGEST_PAUSE_SECONDS", 0.05)

    def run(respond, **options):
        server = Server(respond)
        run.server = server
        sampling = Sampling(64, options.pop("temperature", 0.7))
        model = Endpoint(server.url, "small", **{"concurrency": 4, "timeout": 600.0, **options})
        done = rewrite(
            Task(DocumentSource(path=str(corpus)), model, find_styles("easy"), sampling),
            tmp_path / "out",
        )
        files = sorted((tmp_path / "out").glob("*.jsonl"))
        return done, [json.loads(line) for file in files for line in file.read_text().splitlines()]

    return run


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("{not", "JSON"),
        ("<html>Welcome</html>", "<html>Welcome"),
        ([], "choices"),
        ({"choices": []}, "choices"),
        ({"choices": None}, "choices"),
        ({"choices": ["text"]}, "choices"),
        ({"choices": [{"finish_reason": "stop"}]}, "message"),
        (completion(None), "null"),
        (completion(7), "int"),
        (completion({"text": "x"}), "dict"),
        (completion([{"type": "image_url"}]), "list without text"),
        (completion("x", "error"), "`error`"),
    ],
)
def test_an_answer_that_cannot_be_read_ends_the_run_after_five_calls(ask, body, said):
    with pytest.raises(LaunchError, match=re.escape(said)):
        ask(lambda number, asked: (200, body))
    assert ask.server.calls == 5


def test_one_text_whose_answers_cannot_be_read_is_dropped_after_three(ask):
    def respond(number, asked):
        is_bad = "Report 7 " in asked["messages"][0]["content"]
        return 200, completion(None) if is_bad else completion(prose(number))

    done, rows = ask(respond)
    assert (done.texts, done.dropped, ask.server.calls) == (19, {"unreadable": 1}, 22)


@pytest.mark.parametrize(
    "kinds", ["429 500 slow garbage null lost", "429", "500", "slow", "null 500", "good null"]
)
def test_the_bound_on_calls_holds_whatever_the_server_does(ask, kinds):
    kinds = kinds.split()
    responses = {
        "429": (429, {"error": {"message": "slower"}}),
        "500": (500, "oops"),
        "slow": 0.3,
        "lost": 0.0,
        "garbage": (200, "{"),
        "null": (200, completion(None)),
    }

    def respond(number, asked):
        return responses.get(kinds[number % len(kinds)], (200, completion(prose(number))))

    try:
        done, _ = ask(respond, timeout=0.1)
        assert done.texts + done.dropped.total() == 20 and kinds == ["good", "null"]
    except (Interrupted, LaunchError):
        pass
    assert 5 <= ask.server.calls <= Endpoint("", "", 4, 600.0).most_calls(20) == 60


def test_each_call_that_a_server_puts_off_is_repeated_once(ask):
    def respond(number, asked):
        if number <= 12:
            return 429, {"error": {"message": "slower"}}
        return 200, completion(prose(number))

    done, rows = ask(respond, concurrency=20)
    assert len(rows) == 20 and ask.server.calls == 32


def test_a_server_that_never_answers_is_not_waited_for_forever(ask, monkeypatch):
    monkeypatch.setattr(rewriting_model, "PATIENCE_SECONDS", 0.2)
    with pytest.raises(Interrupted, match="--timeout"):
        ask(lambda number, asked: 5.0, timeout=0.15)


def test_contents_in_parts_are_joined_without_thoughts(ask):
    def respond(number, asked):
        text = prose(number)
        thought = {"type": "thinking", "thinking": [{"type": "text", "text": "SECRET"}]}
        parts = [{"type": "text", "text": text[:9]}, {"type": "text", "text": text[9:]}]
        return 200, completion([thought, *parts])

    _, rows = ask(respond)
    assert {row["text"] for row in rows} == {prose(number) for number in range(1, 21)}


def test_parameters_that_a_server_refuses_are_changed_once_and_recorded(ask, caplog):
    fixed = "Unsupported value: 'temperature' does not support 0.7 with this model. Only the default (1) is supported."
    renamed = (
        "Unsupported parameter: 'max_tokens' is not supported. Use 'max_completion_tokens' instead."
    )
    seen = []

    def respond(number, asked):
        seen.append(asked)
        if "max_tokens" in asked:
            return 400, {
                "error": {
                    "message": renamed,
                    "param": "max_tokens",
                    "code": "unsupported_parameter",
                }
            }
        if asked.get("temperature", 1) != 1:
            return 400, {
                "error": {"message": fixed, "param": "temperature", "code": "unsupported_value"}
            }
        return 200, completion(prose(number))

    with caplog.at_level(logging.WARNING):
        _, rows = ask(respond)
    assert len(rows) == 20 and ask.server.calls == 22
    assert (
        seen[-1]["max_completion_tokens"] == 64
        and "temperature" not in seen[-1]
        and seen[-1]["top_p"] == 0.95
    )
    changed = ["with max_completion_tokens in place of max_tokens", "without temperature"]
    assert all(row["changed_parameters"] == changed for row in rows)
    assert all(
        row["sampling"] == {"max_new_tokens": 64, "temperature": None, "top_p": 0.95}
        for row in rows
    )
    assert (
        len([record for record in caplog.records if "refuses a parameter" in record.message]) == 2
    )


def test_a_refusal_that_no_parameter_explains_ends_the_run_at_once(ask):
    too_large = "max_tokens is too large: 64. This model supports at most 32 completion tokens."
    with pytest.raises(LaunchError, match="too large"):
        ask(lambda number, asked: (400, {"error": {"message": too_large, "param": "max_tokens"}}))
    assert ask.server.calls == 1


def test_a_server_that_refuses_both_names_of_a_parameter_ends_the_run(ask):
    with pytest.raises(LaunchError, match="max_completion_tokens"):
        ask(
            lambda number, asked: (
                400,
                {"error": {"message": "no max_tokens, no max_completion_tokens"}},
            )
        )
    assert ask.server.calls == 2


@pytest.mark.parametrize(
    ("answer", "flaw"),
    [
        (completion(None, "length", reasoning_content="thinking"), "only thoughts"),
        (completion("", "stop", reasoning="thinking"), "only thoughts"),
        (completion([{"type": "thinking", "thinking": []}]), "only thoughts"),
        (completion(None, refusal="I cannot help with that."), "refusal"),
        (completion([{"type": "refusal", "refusal": "No."}]), "refusal"),
        (completion("", "content_filter"), "refusal"),
        (completion("A text.", reasoning_content="thinking"), None),
        (completion("A text.", reasoning_content=None, refusal=None), None),
        (completion(""), None),
    ],
)
def test_thoughts_and_refusals_in_fields_of_their_own(answer, flaw):
    read = read_answer(json.dumps(answer))
    assert read.flaw == flaw and "thinking" not in read.text
    assert bool(read.text) == (answer["choices"][0]["message"]["content"] == "A text.")


def test_a_lone_surrogate_is_replaced_and_no_error():
    assert read_answer('{"choices": [{"message": {"content": "a\\ud800b"}}]}').text == "a?b"
    with pytest.raises(UnreadableAnswerError):
        read_answer('{"choices": [{"message": "text"}]}')


@pytest.mark.parametrize(
    ("content", "reason"),
    [("I'm sorry, but I can't help with that request.", "refusal"), (prose(1), "equal to the")],
)
def test_a_run_ends_when_its_first_answers_are_all_dropped(
    ask, corpus, monkeypatch, content, reason
):
    lines = [json.dumps({"text": f"Report {n} of the mill at Oberau."}) + "\n" for n in range(300)]
    corpus.write_text("".join(lines))
    with pytest.raises(DataError, match=f"no text was kept of 50. Dropped: {reason}"):
        ask(lambda number, asked: (200, completion(content)))
    assert ask.server.calls < 60  # and those that were on their way
