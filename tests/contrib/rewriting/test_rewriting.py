"""`cpt data rewrite`: a model rewrites documents. The local one here has random weights and writes bytes; the server
is one that fails, or `cpt serve`."""

import json
import random
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Thread

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

from cpt.contrib.rewriting import model as rewriting_model
from cpt.contrib.rewriting import rewrite as rewriting
from cpt.contrib.rewriting.generate_replay import ReplayTask, generate_replay
from cpt.contrib.rewriting.model import (
    Answer,
    Answerer,
    Endpoint,
    RewriteQuestion,
    Sampling,
    SeededDraws,
    cut,
    encode,
)
from cpt.contrib.rewriting.rewrite import Task, estimate, rewrite, sha256, why_dropped
from cpt.contrib.rewriting.styles import fill, find_styles
from cpt.errors import DataError, Interrupted, LaunchError, RecipeError
from cpt.process import free_port
from cpt.recipe.schema import DocumentSource, Model

CHAT = (
    "{% for message in messages %}<|turn|>{{ message.role }}\n{{ message.content | trim }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)
QUESTIONS = ["a", "A longer question about things.", "Why?", "b" * 90, "one two three"]
SEEDS = [1, 2**64 - 1, 3, 4, 5]
NEW_TOKENS = 12


@pytest.fixture
def tokenizer():
    """One id a byte, then four special tokens."""
    vocabulary = {
        character: number
        for number, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))
    }
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token="<pad>")
    made.add_special_tokens({"additional_special_tokens": ["<|turn|>", "<|end|>"]})
    return made


@pytest.fixture
def chat_tokenizer(tokenizer):
    tokenizer.chat_template = CHAT
    return tokenizer


def make_model(tokenizer, model_type="llama"):
    """Large random weights, so that its answers differ."""
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    if model_type == "llama":
        shape |= {
            "intermediate_size": 64,
            "num_key_value_heads": 2,
            "max_position_embeddings": 2048,
        }
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}
    config = AutoConfig.for_model(
        model_type, vocab_size=len(tokenizer), initializer_range=0.3, **shape, **ends
    )
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture
def model(tokenizer):
    return make_model(tokenizer)


@pytest.fixture
def model_folder(model, tokenizer, tmp_path):
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def documents(tmp_path):
    """Seven documents of different lengths."""
    texts = [f"Document {number}. " + "It says a thing. " * number for number in range(7)]
    (tmp_path / "corpus.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in texts)
    )
    return tmp_path / "corpus.jsonl"


@pytest.fixture
def task(model_folder, documents):
    """`task(batch_size=2)`: a task of seven documents, all answers kept."""

    def make(**options):
        sampling = options.pop("sampling", Sampling(max_new_tokens=NEW_TOKENS, temperature=1.0))
        defaults = {
            "styles": find_styles(options.pop("styles", "easy")),
            "cut_off": "keep",
            "min_characters": 1,
            "max_input_tokens": 60,
        }
        source = DocumentSource(path=str(documents))
        model = options.pop("model", None) or Model(path=str(model_folder))
        return Task(source, model, sampling=sampling, **{**defaults, **options})

    return make


def rows_of(folder):
    return [
        json.loads(line)
        for file in sorted(folder.glob("*.jsonl"))
        for line in file.read_text().splitlines()
    ]


def bytes_of(folder):
    return {file.name: file.read_bytes() for file in sorted(folder.glob("*.jsonl"))}


@pytest.mark.heavy
def test_the_command_rewrites_a_source_and_finds_it_done_the_next_time(cpt, model_folder, tmp_path):
    (tmp_path / "corpus.jsonl").write_text(
        "".join(json.dumps({"body": f"Document {n}."}) + "\n" for n in range(5))
    )
    words = [
        "data",
        "rewrite",
        tmp_path / "corpus.jsonl",
        "--model",
        model_folder,
        "--output",
        tmp_path / "out",
    ]
    words += [
        "--text-column",
        "body",
        "--max-documents",
        3,
        "--styles",
        "question_answers",
        "--batch-size",
        2,
    ]
    words += ["--max-new-tokens", NEW_TOKENS, "--cut-off", "keep", "--min-characters", 1]
    code, said = cpt(*words)
    assert code == 0 and "3 documents" in said
    rows = rows_of(tmp_path / "out")
    assert rows and {row["style"] for row in rows} == {"question_answers"}
    assert {row["sampling"]["max_new_tokens"] for row in rows} == {NEW_TOKENS}
    assert "; 3 calls answered by the model in this run; 0 group(s)" in said
    assert "; 0 calls answered by the model in this run; 1 group(s)" in cpt(*words)[1]
    code, said = cpt(*words, "--seed", 7)
    assert code == 2 and "run_seed" in said


def test_each_text_records_where_it_comes_from(task, tmp_path, documents, model_folder):
    done = rewrite(task(max_input_tokens=1000), tmp_path / "out")
    rows = rows_of(tmp_path / "out")
    assert (done.documents, done.pieces, done.texts + done.dropped.total()) == (7, 7, 7)
    first, text = rows[0], json.loads(documents.read_text().splitlines()[0])["text"]
    expected = {
        "source_text_hash": sha256(text),
        "source_where": f"{documents}:1",
        "model": str(model_folder),
    }
    expected |= {
        "style": "easy",
        "prompt_sha256": find_styles("easy")[0].sha256,
        "cut_off": True,
        "run_seed": 42,
    }
    expected["sampling"] = {"max_new_tokens": NEW_TOKENS, "temperature": 1.0, "top_p": 0.95}
    assert expected.items() <= first.items() and len(first["model_sha256"]) == 64
    assert len({row["seed"] for row in rows}) == len(rows) == done.texts > 4


@pytest.mark.heavy
def test_an_interrupted_run_ends_the_same_and_repeats_nothing(task, tmp_path, monkeypatch):
    monkeypatch.setattr(rewriting, "GROUP", 2)
    rewrite(task(), tmp_path / "straight")

    def interrupt(done):
        if done.documents == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rewrite(task(), tmp_path / "out", interrupt)
    times = {file: file.stat().st_mtime_ns for file in (tmp_path / "out").glob("*.jsonl")}
    done = rewrite(task(), tmp_path / "out")
    assert done.groups_done_before == len(times) == 2 and done.pieces > done.documents == 7
    assert all(file.stat().st_mtime_ns == time for file, time in times.items())
    assert bytes_of(tmp_path / "out") == bytes_of(tmp_path / "straight")


def test_dropped_answers_are_counted_and_leave_no_empty_file(task, tmp_path):
    done = rewrite(task(cut_off="drop", min_characters=1000), tmp_path / "none")
    assert done.texts == 0 and done.dropped["cut off at max_new_tokens"] > 0
    assert not list((tmp_path / "none").glob("*.jsonl"))
    again = rewrite(task(cut_off="drop", min_characters=1000), tmp_path / "none")
    assert again.groups_done_before == 1 and again.dropped == done.dropped


QUIZ = "Question: In which year did the mill at Oberau burn down? Answer: The mill at Oberau burnt down in 1871."


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (Answer("", False), "empty"),
        (Answer("something new of some length", True), "cut off at max_new_tokens"),
        (Answer("The  text\nitself", False), "copied from the text"),
        (
            Answer("So: " + "a b c d e f g h i j k l m n o p q r s t u v w x y z", False),
            "copied from the text",
        ),
        (Answer("short", False), "too short"),
        (
            Answer(
                "Well, the earlier rewriting of it said the same in exactly these words.", False
            ),
            "near copy",
        ),
        (Answer("It goes on and on. " * 20, False), "gopher"),
        (
            Answer("The exam: " + " ".join(f"word{n}" for n in range(20)), False),
            "contaminated: exam",
        ),
        (Answer("something new of some length", False), None),
        (Answer(QUIZ, False), None),
    ],
)
def test_why_an_answer_is_dropped(task, tmp_path, answer, reason):
    (tmp_path / "exam.jsonl").write_text(
        json.dumps({"text": " ".join(f"word{n}" for n in range(20))})
    )
    text = "This is the text itself. a b c d e f g h i j k l m n o p q r s t u v w x y z"
    others = ["The earlier rewriting of it said the same in exactly these words."]
    strict = task(cut_off="drop", min_characters=10, against=(str(tmp_path / "exam.jsonl"),))
    dropped = why_dropped(answer, text, others, strict)
    assert dropped is reason or (dropped and reason and reason in dropped)


def test_a_style_is_a_name_a_family_or_a_file(tmp_path):
    (tmp_path / "mine.txt").write_text("Say {text} in verse, {name}, {focus}.\n")
    found = find_styles(f"spa,easy,{tmp_path / 'mine.txt'},easy")
    assert len(found) == 9 and [style.name for style in found][7:] == ["easy", "mine.txt"]
    assert (
        fill(found[-1].prompt, "a {text} {focus}")
        == "Say a {text} {focus} in verse, {name}, {focus}.\n"
    )
    (tmp_path / "other.txt").write_text("no place")
    for name, named in (
        (str(tmp_path / "other.txt"), "other.txt"),
        ("clear_pose", "`clear_prose`"),
        ("", "spa"),
    ):
        with pytest.raises(RecipeError, match=named):
            find_styles(name)


def test_a_list_gives_the_further_calls_each_item_or_pairs_and_triples():
    (reading,), (graph,) = find_styles("active_reading"), find_styles("entigraph")
    listed = "Here they are:\n1. **Ada**\n2) 3.5 mills\n\n- Ada\n* Oberau"
    assert reading.foci(listed, 8, 0) == ["Ada", "3.5 mills", "Oberau"]
    assert graph.foci(listed, 8, 0) == [
        "Ada; 3.5 mills",
        "Ada; Oberau",
        "3.5 mills; Oberau",
        "Ada; 3.5 mills; Oberau",
    ]
    some = graph.foci("\n".join("abcdefgh"), 5, 7)
    assert len(set(some)) == 5 and some == graph.foci("\n".join("abcdefgh"), 5, 7)
    assert graph.foci("Only one", 5, 7) == reading.foci("", 5, 7) == []


class Server:
    """An OpenAI-compatible server: lists for first calls, else a text that the prompt and the seed decide. The first
    time, a call gets `failure` with the probability `share`."""

    def __init__(self, share=0.0, kinds=(), unsteady=False):
        self.calls, self.keys, self.share, self.unsteady = Counter(), set(), share, unsteady
        draws, lock, server = random.Random(0), Lock(), self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                prompt = asked["messages"][0]["content"], asked["seed"]
                with lock:
                    server.calls[prompt] += 1
                    server.keys.add(self.headers["Authorization"])
                    fails = server.calls[prompt] == 1 and draws.random() < server.share
                    kind = draws.choice(kinds) if fails else None
                choice = {"message": {"content": server.answer(*prompt)}, "finish_reason": "stop"}
                content = json.dumps({"choices": [choice], "model": "served"})
                content = {"malformed": "{not", "empty": '{"choices": []}'}.get(kind, content)
                if kind == "lost":
                    self.connection.shutdown(2)
                    self.close_connection = True
                    return
                time.sleep(1.5 * (kind == "slow"))
                self.send_response(kind if isinstance(kind, int) else 200)
                headers = {
                    "Retry-After": 0.1,
                    "Content-Type": "application/json",
                    "Content-Length": len(content),
                }
                for name, value in headers.items():
                    self.send_header(name, str(value))
                self.end_headers()
                self.wfile.write(content.encode())

            def log_message(self, *words):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        Thread(target=self.server.serve_forever, daemon=True).start()

    def answer(self, prompt, seed):
        if prompt.endswith(("Entities:", "Study strategies:")):
            return "One\nTwo\nThree"
        words = random.Random(f"{prompt} {seed} {time.time_ns() * self.unsteady}")
        return " ".join(f"{words.choice('bdfgk')}{words.random():.6f}" for _ in range(20))

    def endpoint(self, **options):
        return Endpoint(
            f"http://127.0.0.1:{self.server.server_port}/v1",
            "small",
            **{"concurrency": 4, "timeout": 600.0, **options},
        )


@pytest.mark.slow
def test_a_server_that_fails_changes_nothing_but_the_time(task, tmp_path, monkeypatch):
    monkeypatch.setattr(rewriting, "GROUP", 2)
    monkeypatch.setattr(rewriting_model, "PAUSE_SECONDS", 0.05)
    styles, server = "spa,active_reading,entigraph", Server()
    whole = task(model=server.endpoint(), styles=styles)
    steady = rewrite(whole, tmp_path / "steady")
    assert (
        steady.calls == server.calls.total() == steady.pieces * (7 + 1 + 3 + 1 + 4)
        and not steady.dropped
    )
    assert steady.calls_settled == estimate(whole).calls
    kinds = (429, 500, 503, "malformed", "empty", "lost", "slow")
    failing = Server(0.2, kinds)
    done = rewrite(task(model=failing.endpoint(timeout=1.0), styles=styles), tmp_path / "failing")
    assert failing.calls.total() > server.calls.total() and not done.dropped
    assert bytes_of(tmp_path / "failing") == bytes_of(tmp_path / "steady")
    rows = rows_of(tmp_path / "steady")
    assert len(rows) == done.pieces * (7 + 3 + 4) and {row["endpoint_model"] for row in rows} == {
        "served"
    }
    assert Counter(row["stage"] for row in rows)[2] == done.pieces * 7
    assert {row["focus"] for row in rows if row["style"] == "active_reading"} == {
        "One",
        "Two",
        "Three",
    }


@pytest.mark.heavy
def test_an_answer_of_a_server_is_paid_once(task, tmp_path):
    server = Server(unsteady=True)
    options = {"model": server.endpoint(), "styles": "easy,entigraph", "repeats": 2}

    def interrupt(done):
        if done.calls == 9:
            raise Interrupted

    for _ in range(3):
        with pytest.raises(Interrupted):
            rewrite(task(**options), tmp_path / "out", interrupt)
    done = rewrite(task(**options), tmp_path / "out")
    rows = rows_of(tmp_path / "out")
    texts = [
        (row["source_where"], row["piece"], row["style"], row["repeat"], row.get("focus"))
        for row in rows
    ]
    assert (
        len(texts) == len(set(texts)) == done.texts == done.pieces * 2 * (1 + 4)
        and not done.dropped
    )
    assert server.calls.total() - len(server.calls) <= 3 * 4  # the calls in flight
    assert not list((tmp_path / "out" / rewriting.OWN_FOLDER).glob("*.answers.jsonl"))


@pytest.mark.heavy
def test_a_call_that_cannot_succeed_ends_the_command(task, tmp_path, monkeypatch):
    monkeypatch.setenv("CPT_API_KEY", "sk-secret")
    refusing = Server(1.0, (401,))
    gone = Endpoint(f"http://127.0.0.1:{free_port()}/v1", "small", 4, 600.0)
    with pytest.raises(LaunchError, match="CPT_API_KEY"):
        rewrite(task(model=refusing.endpoint()), tmp_path / "out")
    assert refusing.keys == {"Bearer sk-secret"}
    assert not [
        file for file in tmp_path.rglob("*") if file.is_file() and b"sk-secret" in file.read_bytes()
    ]
    monkeypatch.setattr(rewriting_model, "PATIENCE_SECONDS", 0.5)
    with pytest.raises(Interrupted, match="resume"):
        rewrite(task(model=replace(gone, model="corrected")), tmp_path / "out")


def test_the_estimate_counts_calls_and_tokens(task, documents):
    text = " ".join(json.loads(line)["text"] for line in documents.read_text().splitlines())
    found = estimate(
        task(
            model=Endpoint("http://x/v1", "small", 4, 600.0),
            styles="easy,active_reading",
            max_input_tokens=900,
        )
    )
    assert (found.documents, found.texts, found.calls, found.output_tokens) == (
        7,
        7,
        7 * 10,
        7 * 10 * NEW_TOKENS,
    )
    assert found.input_tokens > 10 * len(text) / 4


@pytest.mark.slow
def test_two_hundred_documents_survive_three_kills(task, model_folder, chat_tokenizer, tmp_path):
    from cpt.contrib.serving.serve import check_servable, serving

    chat_tokenizer.save_pretrained(model_folder)
    (tmp_path / "corpus.jsonl").write_text(
        "".join(f'{{"text": "Report {n}: the mill."}}\n' for n in range(200))
    )
    words = [
        "data",
        "rewrite",
        tmp_path / "corpus.jsonl",
        "--model",
        model_folder,
        "--output",
        tmp_path / "out",
    ]
    words += [
        "--max-new-tokens",
        NEW_TOKENS,
        "--cut-off",
        "keep",
        "--min-characters",
        1,
        "--temperature",
        1.0,
    ]
    servable, straight = check_servable(str(model_folder)), tmp_path / "straight"
    with serving(*servable, host="127.0.0.1", port=free_port(), dtype="auto", device="cpu") as url:
        command = [
            sys.executable,
            "-m",
            "cpt",
            *map(str, words),
            "--endpoint",
            f"{url}/v1",
            "--concurrency",
            "8",
        ]
        journal = tmp_path / "out" / rewriting.OWN_FOLDER / "00000.answers.jsonl"
        for answered in (20, 80, 150):
            process = subprocess.Popen(command)
            while not journal.exists() or journal.read_bytes().count(b"\n") < answered:
                assert process.poll() is None
                time.sleep(0.05)
            process.kill()
            process.wait()
        assert subprocess.run(command).returncode == 0
        whole = task(
            model=Endpoint(f"{url}/v1", str(model_folder), 32, 600.0),
            styles="clear_prose",
            max_input_tokens=300,
        )
        rewrite(
            replace(whole, source=DocumentSource(path=str(tmp_path / "corpus.jsonl"))), straight
        )
    rows = rows_of(tmp_path / "out")
    assert {row["source_where"] for row in rows} == {
        f"{tmp_path / 'corpus.jsonl'}:{n}" for n in range(1, 201)
    }
    assert len(rows) == 200 and bytes_of(tmp_path / "out") == bytes_of(straight)


def answers(model, tokenizer, batch_size=5, seeds=SEEDS, **sampling):
    answerer = Answerer(
        model, tokenizer, Sampling(**{"max_new_tokens": NEW_TOKENS, **sampling}), batch_size
    )
    return answerer.answer([encode(tokenizer, question) for question in QUESTIONS], seeds)


@pytest.mark.parametrize(("model_type", "temperature"), [("llama", 1.3), ("gpt2", 0)])
def test_a_batch_gets_the_answers_that_each_question_gets_alone(tokenizer, model_type, temperature):
    model = make_model(tokenizer, model_type)
    alone, two, five = (
        answers(model, tokenizer, size, temperature=temperature) for size in (1, 2, 5)
    )
    assert five == two == alone and len({answer.text for answer in alone}) == 5


def decoded(tokenizer, ids):
    return tokenizer.decode(ids, skip_special_tokens=True).replace("\0", "").strip()


def test_a_greedy_answer_is_the_most_likely_tokens_up_to_the_models_end_of_turn(model, tokenizer):
    question = encode(tokenizer, QUESTIONS[0])
    written = list(question)
    for _ in range(NEW_TOKENS):
        written.append(int(model(torch.tensor([written]), use_cache=False).logits[0, -1].argmax()))
    written = written[len(question) :]
    whole = answers(model, tokenizer, temperature=0)[0]
    assert whole.is_cut_off and whole.text == decoded(tokenizer, written)
    model.generation_config = GenerationConfig(
        eos_token_id=[written[9]], num_beams=3, repetition_penalty=5.0
    )
    ended = answers(model, tokenizer, temperature=0)[0]
    assert not ended.is_cut_off
    assert ended.text == decoded(tokenizer, written[: written.index(written[9])])


def test_sampling_follows_the_seed_and_not_torchs_own(model, tokenizer):
    torch.manual_seed(1)
    first = answers(model, tokenizer)
    torch.manual_seed(2)
    assert answers(model, tokenizer) == first
    other = answers(model, tokenizer, seeds=SEEDS[::-1])
    assert [one == two for one, two in zip(first, other, strict=True)] == [
        False,
        False,
        True,
        False,
        False,
    ]


def test_draws_follow_the_softmax():
    logits = torch.tensor([2.0, 1.0, -torch.inf, 0.0, -1.0])
    seeds = range(2**40, 2**40 + 20_000)
    ids = torch.zeros(len(seeds), 2, dtype=torch.long)
    drawn = SeededDraws(seeds, 1, 2)(ids, logits.expand(len(seeds), -1)).argmax(-1)
    shares = torch.bincount(drawn, minlength=5) / len(drawn)
    torch.testing.assert_close(shares, logits.softmax(-1), atol=0.015, rtol=0)


def test_a_chat_template_is_written_around_the_prompt_as_the_tokenizer_does_it(chat_tokenizer):
    message = [{"role": "user", "content": "Say: hello\n"}]
    expected = chat_tokenizer.apply_chat_template(
        message, add_generation_prompt=True, return_dict=False
    )
    assert RewriteQuestion(chat_tokenizer).ids("Say: hello\n") == expected


def test_special_tokens_in_a_document_are_text_and_end_no_turn(chat_tokenizer):
    plain, hostile = (
        RewriteQuestion(chat_tokenizer).ids(f"Say: {text}") for text in ("x", "<|end|>")
    )
    end = chat_tokenizer.convert_tokens_to_ids("<|end|>")
    assert plain.count(end) == hostile.count(
        end
    ) == 1 and "Say: <|end|><|end|>" in chat_tokenizer.decode(hostile)


def test_a_long_text_is_cut_at_the_ends_of_paragraphs(tokenizer):
    text = "\n\n".join(["a" * 30, "b" * 30, "c" * 30, "d" * 90])
    assert cut(text, 70, lambda part: len(encode(tokenizer, part))) == [
        "a" * 30 + "\n\n" + "b" * 30,
        "c" * 30,
        "d" * 45,
        "d" * 45,
    ]


@pytest.mark.parametrize("text", ["One sentence. " * 40, "x" * 400, "é" * 300, "a\n\n\n\n" * 60])
def test_no_piece_is_too_long_and_nothing_but_blanks_is_lost(tokenizer, text):
    pieces = cut(text, 64, lambda part: len(encode(tokenizer, part)))
    assert all(0 < len(encode(tokenizer, piece)) <= 64 for piece in pieces)
    assert "".join("".join(pieces).split()) == "".join(text.split())


# --- cpt data generate-replay ---


@pytest.fixture
def replay(model_folder):
    """`replay(folder, tokens)`: the last counts; texts are 12 random bytes."""

    def run(folder, tokens, **options):
        options = {"max_new_tokens": NEW_TOKENS, "min_characters": 4, **options}
        return list(
            generate_replay(ReplayTask(Model(path=str(model_folder)), **options), tokens, folder)
        )[-1]

    return run


def test_replay_is_written_until_it_has_the_tokens_and_continues_when_more_are_asked(
    replay, tokenizer, tmp_path, monkeypatch
):
    monkeypatch.setattr(rewriting, "GROUP", 4)
    whole = replay(tmp_path / "whole", 100)
    rows = rows_of(tmp_path / "whole")
    sizes = [len(encode(tokenizer, row["text"])) for row in rows]
    assert sum(sizes[:-1]) < 100 <= sum(sizes) == whole["tokens"] and len(rows) == whole["texts"]
    assert len({row["seed"] for row in rows}) == len(rows) and {
        row["run_seed"] for row in rows
    } == {42}
    for tokens, batch_size in ((30, 1), (70, 3), (100, 8)):
        counts = replay(tmp_path / "parts", tokens, batch_size=batch_size)
    assert (
        bytes_of(tmp_path / "parts") == bytes_of(tmp_path / "whole")
        and counts["texts"] == whole["texts"]
    )
    with pytest.raises(RecipeError, match="run_seed"):
        replay(tmp_path / "parts", 100, seed=7)


@pytest.mark.heavy
def test_an_interrupted_replay_ends_the_same(replay, model_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(rewriting, "GROUP", 2)
    task = ReplayTask(Model(path=str(model_folder)), max_new_tokens=NEW_TOKENS, min_characters=4)
    begun = generate_replay(task, 400, tmp_path / "out")
    assert next(begun)["tokens"] < next(begun)["tokens"] < 400
    begun.close()
    first = bytes_of(tmp_path / "out")
    replay(tmp_path / "out", 400)
    replay(tmp_path / "whole", 400)
    assert (
        first.items() < bytes_of(tmp_path / "out").items() == bytes_of(tmp_path / "whole").items()
    )


def test_prompts_begin_the_texts_in_turn(replay, tmp_path):
    replay(tmp_path / "out", 300, prompts=["The history of", "1 +"], min_characters=1)
    by_prompt = {row["number"] % 2: row["text"] for row in rows_of(tmp_path / "out")}
    assert by_prompt[0].startswith("The history of") and by_prompt[1].startswith("1 +")


def test_replay_that_is_all_dropped_is_an_error_instead_of_an_endless_run(
    replay, tmp_path, monkeypatch
):
    monkeypatch.setattr(rewriting, "GROUP", 4)
    with pytest.raises(DataError, match="--min-characters"):
        replay(tmp_path / "out", 100, min_characters=1000)
    with pytest.raises(RecipeError, match="--max-new-tokens"):
        replay(tmp_path / "out", 100, max_new_tokens=5000)
