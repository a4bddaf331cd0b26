"""`cpt data rewrite`: a local model rewrites documents. The model here has random weights and writes bytes."""

import json

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

from cpt.commands import rewriting
from cpt.commands.generate_replay import ReplayTask, generate_replay
from cpt.commands.rewriting import Task, find_prompt, rewrite, sha256, why_dropped
from cpt.commands.rewriting_model import Answer, Answerer, RewriteQuestion, Sampling, SeededDraws, cut, encode
from cpt.data.readers.sources import open_source
from cpt.errors import DataError, RecipeError
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
    vocabulary = {character: number for number, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
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
        shape |= {"intermediate_size": 64, "num_key_value_heads": 2, "max_position_embeddings": 2048}
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}
    config = AutoConfig.for_model(model_type, vocab_size=len(tokenizer), initializer_range=0.3, **shape, **ends)
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
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return tmp_path / "corpus.jsonl"


@pytest.fixture
def task(model_folder, documents):
    """`task(batch_size=2)`: a task of seven documents, all answers kept."""

    def make(**options):
        sampling = options.pop("sampling", Sampling(max_new_tokens=NEW_TOKENS, temperature=1.0))
        defaults = {"prompt": find_prompt("easy"), "cut_off": "keep", "min_characters": 1, "max_input_tokens": 60}
        source = DocumentSource(path=str(documents))
        return Task(source, Model(path=str(model_folder)), sampling=sampling, **{**defaults, **options})

    return make


def rows_of(folder):
    return [json.loads(line) for file in sorted(folder.glob("*.jsonl")) for line in file.read_text().splitlines()]


def bytes_of(folder):
    return {file.name: file.read_bytes() for file in sorted(folder.glob("*.jsonl"))}


@pytest.mark.heavy
def test_the_command_rewrites_a_source_and_finds_it_done_the_next_time(cpt, model_folder, tmp_path):
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps({"body": f"Document {n}."}) + "\n" for n in range(5)))
    words = ["data", "rewrite", tmp_path / "corpus.jsonl", "--model", model_folder, "--output", tmp_path / "out"]
    words += ["--text-column", "body", "--max-documents", 3, "--prompt", "question_answers", "--batch-size", 2]
    words += ["--max-new-tokens", NEW_TOKENS, "--cut-off", "keep", "--min-characters", 1]
    code, said = cpt(*words)
    assert code == 0 and "3 documents" in said
    rows = rows_of(tmp_path / "out")
    assert rows and {row["prompt"] for row in rows} == {"question_answers"}
    assert {row["sampling"]["max_new_tokens"] for row in rows} == {NEW_TOKENS}
    assert "1 group(s) were finished before" in cpt(*words)[1]
    code, said = cpt(*words, "--seed", 7)
    assert code == 2 and "run_seed" in said


def test_each_text_records_where_it_comes_from(task, tmp_path, documents, model_folder):
    done = rewrite(task(max_input_tokens=1000), tmp_path / "out")
    rows = rows_of(tmp_path / "out")
    assert (done.documents, done.pieces, done.texts + done.dropped.total()) == (7, 7, 7)
    first, text = rows[0], json.loads(documents.read_text().splitlines()[0])["text"]
    expected = {"source_text_hash": sha256(text), "source_where": f"{documents}:1", "model": str(model_folder)}
    expected |= {"prompt": "easy", "prompt_sha256": find_prompt("easy").sha256, "cut_off": True, "run_seed": 42}
    expected["sampling"] = {"max_new_tokens": NEW_TOKENS, "temperature": 1.0, "top_p": 0.95}
    assert expected.items() <= first.items() and len(first["model_sha256"]) == 64
    assert len({row["seed"] for row in rows}) == len(rows) == done.texts > 4


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


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (Answer("", False), "empty"),
        (Answer("something new of some length", True), "cut off at max_new_tokens"),
        (Answer("The  text\nitself", False), "copied from the text"),
        (Answer("short", False), "too short"),
        (Answer("something new of some length", False), None),
    ],
)
def test_why_an_answer_is_dropped(task, answer, reason):
    assert why_dropped(answer, "This is the text itself.", task(cut_off="drop", min_characters=10)) == reason


def test_a_prompt_is_a_file_or_a_name(tmp_path):
    (tmp_path / "mine.txt").write_text("Say {text} in verse, {name}.\n")
    prompt = find_prompt(str(tmp_path / "mine.txt"))
    assert prompt.name == "mine.txt" and prompt.template == "Say {text} in verse, {name}.\n"
    (tmp_path / "other.txt").write_text("no place")
    for name, named in ((str(tmp_path / "other.txt"), "other.txt"), ("clear_pose", "`clear_prose`")):
        with pytest.raises(RecipeError, match=named):
            find_prompt(name)


def answers(model, tokenizer, batch_size=5, seeds=SEEDS, **sampling):
    answerer = Answerer(model, tokenizer, Sampling(**{"max_new_tokens": NEW_TOKENS, **sampling}), batch_size)
    return answerer.answer([encode(tokenizer, question) for question in QUESTIONS], seeds)


@pytest.mark.parametrize(("model_type", "temperature"), [("llama", 1.3), ("gpt2", 0)])
def test_a_batch_gets_the_answers_that_each_question_gets_alone(tokenizer, model_type, temperature):
    model = make_model(tokenizer, model_type)
    alone, two, five = (answers(model, tokenizer, size, temperature=temperature) for size in (1, 2, 5))
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
    model.generation_config = GenerationConfig(eos_token_id=[written[9]], num_beams=3, repetition_penalty=5.0)
    ended = answers(model, tokenizer, temperature=0)[0]
    assert not ended.is_cut_off
    assert ended.text == decoded(tokenizer, written[: written.index(written[9])])


def test_sampling_follows_the_seed_and_not_torchs_own(model, tokenizer):
    torch.manual_seed(1)
    first = answers(model, tokenizer)
    torch.manual_seed(2)
    assert answers(model, tokenizer) == first
    other = answers(model, tokenizer, seeds=SEEDS[::-1])
    assert [one == two for one, two in zip(first, other, strict=True)] == [False, False, True, False, False]


def test_draws_follow_the_softmax():
    logits = torch.tensor([2.0, 1.0, -torch.inf, 0.0, -1.0])
    seeds = range(2**40, 2**40 + 20_000)
    ids = torch.zeros(len(seeds), 2, dtype=torch.long)
    drawn = SeededDraws(seeds, 1, 2)(ids, logits.expand(len(seeds), -1)).argmax(-1)
    shares = torch.bincount(drawn, minlength=5) / len(drawn)
    torch.testing.assert_close(shares, logits.softmax(-1), atol=0.015, rtol=0)


def test_a_chat_template_is_written_around_the_prompt_as_the_tokenizer_does_it(chat_tokenizer):
    message = [{"role": "user", "content": "Say: hello\n"}]
    expected = chat_tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)
    assert RewriteQuestion(chat_tokenizer, "Say: {text}\n").ids("hello") == expected


def test_special_tokens_in_a_document_are_text_and_end_no_turn(chat_tokenizer):
    plain, hostile = (RewriteQuestion(chat_tokenizer, "Say: {text}").ids(text) for text in ("x", "<|end|>"))
    end = chat_tokenizer.convert_tokens_to_ids("<|end|>")
    assert plain.count(end) == hostile.count(end) == 1 and "Say: <|end|><|end|>" in chat_tokenizer.decode(hostile)


def test_a_long_text_is_cut_at_the_ends_of_paragraphs(tokenizer):
    text = "\n\n".join(["a" * 30, "b" * 30, "c" * 30, "d" * 90])
    assert cut(text, 70, tokenizer) == ["a" * 30 + "\n\n" + "b" * 30, "c" * 30, "d" * 45, "d" * 45]


@pytest.mark.parametrize("text", ["One sentence. " * 40, "x" * 400, "é" * 300, "a\n\n\n\n" * 60])
def test_no_piece_is_too_long_and_nothing_but_blanks_is_lost(tokenizer, text):
    pieces = cut(text, 64, tokenizer)
    assert all(0 < len(encode(tokenizer, piece)) <= 64 for piece in pieces)
    assert "".join("".join(pieces).split()) == "".join(text.split())


# --- cpt data generate-replay ---


@pytest.fixture
def replay(model_folder):
    """`replay(folder, tokens)`: the last counts; texts are 12 random bytes."""

    def run(folder, tokens, **options):
        options = {"max_new_tokens": NEW_TOKENS, "min_characters": 4, **options}
        return list(generate_replay(ReplayTask(Model(path=str(model_folder)), **options), tokens, folder))[-1]

    return run


def test_replay_is_written_until_it_has_the_tokens_and_continues_when_more_are_asked(
    replay, tokenizer, tmp_path, monkeypatch
):
    monkeypatch.setattr(rewriting, "GROUP", 4)
    whole = replay(tmp_path / "whole", 100)
    rows = rows_of(tmp_path / "whole")
    sizes = [len(encode(tokenizer, row["text"])) for row in rows]
    assert sum(sizes[:-1]) < 100 <= sum(sizes) == whole["tokens"] and len(rows) == whole["texts"]
    assert len({row["seed"] for row in rows}) == len(rows) and {row["run_seed"] for row in rows} == {42}
    for tokens, batch_size in ((30, 1), (70, 3), (100, 8)):
        counts = replay(tmp_path / "parts", tokens, batch_size=batch_size)
    assert bytes_of(tmp_path / "parts") == bytes_of(tmp_path / "whole") and counts["texts"] == whole["texts"]
    assert replay(tmp_path / "parts", 100)["groups finished before"] == len(bytes_of(tmp_path / "parts"))
    with pytest.raises(RecipeError, match="run_seed"):
        replay(tmp_path / "parts", 100, seed=7)


def test_an_interrupted_replay_ends_the_same(replay, model_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(rewriting, "GROUP", 2)
    task = ReplayTask(Model(path=str(model_folder)), max_new_tokens=NEW_TOKENS, min_characters=4)
    begun = generate_replay(task, 400, tmp_path / "out")
    assert next(begun)["tokens"] < next(begun)["tokens"] < 400
    begun.close()
    first = bytes_of(tmp_path / "out")
    replay(tmp_path / "out", 400)
    replay(tmp_path / "whole", 400)
    assert first.items() < bytes_of(tmp_path / "out").items() == bytes_of(tmp_path / "whole").items()


def test_prompts_begin_the_texts_in_turn_and_keep_the_blank_after_them(replay, tmp_path):
    replay(tmp_path / "out", 300, prompts=["The history of", "1 +"], min_characters=1)
    by_prompt = {row["number"] % 2: row["text"] for row in rows_of(tmp_path / "out")}
    assert by_prompt[0].startswith("The history of") and by_prompt[1].startswith("1 +")


def test_replay_that_is_all_dropped_is_an_error_instead_of_an_endless_run(replay, tmp_path, monkeypatch):
    monkeypatch.setattr(rewriting, "GROUP", 4)
    with pytest.raises(DataError, match="--min-characters"):
        replay(tmp_path / "out", 100, min_characters=1000)
    with pytest.raises(RecipeError, match="--max-new-tokens"):
        replay(tmp_path / "out", 100, max_new_tokens=5000)


@pytest.mark.heavy
def test_a_recipe_reads_what_generate_replay_wrote(cpt, model_folder, tmp_path):
    words = ["data", "generate-replay", model_folder, "--output", tmp_path / "out", "--min-characters", 4]
    assert cpt(*words, "--tokens", "0.2k", "--max-new-tokens", NEW_TOKENS)[0] == 0
    texts = [document.text for document in open_source(DocumentSource(path=str(tmp_path / "out")), "source")]
    assert texts == [row["text"] for row in rows_of(tmp_path / "out")]
    for wrong in (["--tokens", "many"], ["--tokens", "1k", "--temperature", 0], ["--tokens", -5]):
        code, said = cpt(*words, *wrong)
        assert code == 2 and wrong[0 if len(wrong) == 2 else 2] in said
