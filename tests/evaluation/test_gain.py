"""What a gain is made of, with models that learned only what was planted."""

import copy
import json
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from run_folders import write_lines
from threads_as_ranks import on_ranks
from tiny import write_recipe
from tiny_checkpoints import random_llama

from cpt.data.readers.decontamination import runs_of
from cpt.data.rows.contamination import search_training
from cpt.data.store.tokenization import DocumentEncoder
from cpt.evaluation.evaluate import complete_verdict
from cpt.evaluation.gain import (
    LINES,
    OTHER,
    PHRASES,
    Gain,
    copied_spans,
    gain_of,
    line_spans,
    mark_set,
    nats_of_parts,
)
from cpt.evaluation.paired import save_losses
from cpt.evaluation.scoring import document_losses
from cpt.evaluation.sets import data_of_texts, open_evaluation_sets
from cpt.recipe.load import dump_recipe, load_recipe
from cpt.recipe.schema import Data, Evaluation, HeldOut, Source
from cpt.runs.record import Run

FOOTER = "All rights reserved by the company. Contact us  for more information."
NONE = np.empty(0, np.uint64)


WORDS = ["".join(random.Random(n).choices("abcdefghiklmnoprstu", k=5)) for n in range(400)]


def phrase_of(number):
    """12 words that two documents of this number have, one of each set."""
    draw = random.Random(1000 + number)
    return " ".join(str(draw.randint(1000, 9999)) for _ in range(12))


def documents(seed, count=40, *, footer="", has_phrases=False):
    draw = random.Random(seed)
    bodies = [" ".join(draw.choice(WORDS) for _ in range(30)) for _ in range(count)]
    phrases = [phrase_of(number) if has_phrases else "" for number in range(count)]
    return [
        f"{body[:83]} {phrase} {body[84:]}\n{footer}".strip()
        for body, phrase in zip(bodies, phrases, strict=True)
    ]


def write(path, texts):
    write_lines(path, [{"text": text} for text in texts])
    return path


def opened(path, tokenizer, packing="best_fit", length=512):
    held = data_of_texts([f"domain={path}"], length)
    held = replace(held, data=held.data.model_copy(update={"packing": packing}))
    return open_evaluation_sets(held, tokenizer)["domain"]


def learn(model, tokenizer, texts, parts):
    """Train a copy of the model on a part of each text; of the rest it keeps the base's probabilities."""
    learned = copy.deepcopy(model).train()
    optimizer = torch.optim.AdamW(learned.parameters(), lr=3e-3)
    for text, part in zip(texts, parts, strict=True):
        encoded = tokenizer(text, return_offsets_mapping=True)
        ids, first = torch.tensor(encoded["input_ids"]), text.find(part)
        ends = torch.tensor([end for _, end in encoded["offset_mapping"]])[1:]
        is_part = (first < ends) & (ends <= first + len(part))
        after = learned(ids[None]).logits[0, :-1].log_softmax(-1)
        with torch.no_grad():
            before = model(ids[None]).logits[0, :-1].log_softmax(-1)
        loss = F.nll_loss(after[is_part], ids[1:][is_part])
        if not is_part.all():
            loss = (
                loss
                + F.kl_div(after, before, log_target=True, reduction="none")[~is_part]
                .sum(-1)
                .mean()
            )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return learned.eval()


@pytest.mark.parametrize("packing", ["best_fit", "token_budget", "none"])
def test_the_losses_of_the_parts_are_those_of_plain_transformers(tokenizer, tmp_path, packing):
    training = write(tmp_path / "train.jsonl", documents(2, 5, has_phrases=True))
    path = write(tmp_path / "held.jsonl", documents(1, 25, footer=FOOTER, has_phrases=True))
    evaluation = Evaluation(perplexity=[HeldOut(name="domain", path=str(path))])
    data = Data(sequence_length=512, sources=[Source(path=str(training))])
    copied = search_training(data, evaluation).copied
    of_set = opened(path, tokenizer, packing)
    marked = mark_set(of_set, DocumentEncoder(tokenizer), copied)
    model, expected = random_llama(), np.zeros(3)
    for number, line in enumerate(path.read_text().splitlines()):
        text = json.loads(line)["text"]
        encoded = tokenizer(text, return_offsets_mapping=True, add_special_tokens=False)
        ids = [*encoded["input_ids"], tokenizer.eos_token_id]
        begins = len(ids)
        if (
            tokenizer.bos_token_id is not None
            and tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id
        ):
            ids = [tokenizer.bos_token_id, *ids]
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, :-1]
        nats = F.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none").tolist()
        last_characters = [None] * (len(ids) - begins) + [
            end - 1 for _, end in encoded["offset_mapping"]
        ]
        for loss, at in zip(nats, [*last_characters[1:], None], strict=True):
            footer, phrase, length = (
                text.find(FOOTER),
                text.find(phrase_of(number)),
                len(phrase_of(0)),
            )
            part = OTHER
            if at is not None and number < 5 and phrase <= at < phrase + length:
                part = PHRASES
            if at is not None and footer <= at < footer + len(FOOTER):
                part = LINES
            expected[part] += loss
    assert (expected > 0).all() and marked.unknown == 0
    assert nats_of_parts(model, marked, batch_size=4) == pytest.approx(expected, rel=1e-4)


def test_rows_that_cut_documents_lose_no_token(tokenizer, tmp_path):
    path = write(tmp_path / "held.jsonl", documents(1, footer=FOOTER))
    of_set = opened(path, tokenizer, length=64)
    marked = mark_set(of_set, DocumentEncoder(tokenizer), NONE)
    whole = document_losses(random_llama(), {"domain": of_set.rows}, batch_size=4)["domain"]
    parts = nats_of_parts(random_llama(), marked, 4)
    assert parts.sum() == pytest.approx(whole.nats.sum())
    models = [random_llama() for _ in range(3)]
    for of_rank in on_ranks(3, lambda rank: nats_of_parts(models[rank], marked, 4)):
        assert of_rank == pytest.approx(parts)


def test_a_document_with_other_tokens_is_left_out_and_counted(tokenizer, tmp_path):
    path = write(tmp_path / "held.jsonl", documents(1, footer=FOOTER))
    of_set = opened(path, tokenizer)
    stored = of_set.rows.rows.documents
    wrong = int(stored.offsets[3]) + 2
    tokens = stored.tokens
    stored.tokens = lambda start, length: (
        tokens(start, length) + (np.arange(start, start + length) == wrong).astype(np.uint16)
    )
    marked = mark_set(of_set, DocumentEncoder(tokenizer), NONE)
    del stored.tokens
    assert marked.unknown == 1
    whole = document_losses(random_llama(), {"domain": of_set.rows}, batch_size=4)["domain"]
    others = np.delete(whole.nats, list(of_set.rows.chosen).index(3)).sum()
    assert nats_of_parts(random_llama(), marked, 4).sum() == pytest.approx(others)
    gain = gain_of(marked, np.array([9.0, 0, 1]), np.array([1.0, 0, 1]))
    assert gain.lines == 1 and "1 document" in gain.sentences()[0]
    assert gain_of(marked, np.zeros(3), np.ones(3)) is None


LINES_OF = "of the gain is in lines that most documents share, such as `the footer`."
PHRASES_OF = "of the gain is in phrases of 8 or more words that training documents also have"


@pytest.mark.parametrize(
    ("lines", "phrases", "expected"),
    [
        (0.1, 0.1, []),
        (0.15, 0.1, [f"15 % {LINES_OF}"]),
        (0.1, 0.15, [f"15 % {PHRASES_OF}"]),
        (0.1, 0.5, [f"50 % {PHRASES_OF}"]),
        (1.5, 0.6, [f"100 % {LINES_OF}", f"60 % {PHRASES_OF}"]),
    ],
)
def test_parts_of_more_than_a_tenth_of_the_gain_are_reported(lines, phrases, expected):
    """Documents that are not counted are mentioned once, at the end."""
    gain = Gain("domain", lines, phrases, "the footer")
    sentences = gain.sentences()
    starts = [f"`domain`: {part}" for part in expected]
    assert [
        sentence[: len(start)] for sentence, start in zip(sentences, starts, strict=True)
    ] == starts
    assert gain.is_copied is (phrases > 0.5)
    counted = replace(gain, unknown=1234).sentences()
    if expected:
        remark = " 1,234 documents are not counted: their tokens differ."
        assert counted == [*sentences[:-1], sentences[-1] + remark]
    else:
        assert counted == []


def test_a_shared_paragraph_and_a_shared_line_are_marked_where_they_are():
    lines = ["one line", "first of two\nsecond of two", "alone"]
    text = "a\none  line\nb\n\nfirst of two\nsecond  of two\n\nalone\n\nalone again"
    marked = [text[first:last] for first, last in line_spans(text, lines)]
    assert marked == ["one  line", "first of two\nsecond  of two", "alone", "alone"]


def test_a_text_of_fewer_words_than_a_phrase_has_no_phrase():
    words = [f"word{number}" for number in range(10)]
    text = " ".join(words)
    copied = runs_of([word.encode() for word in words])[1:2]
    spans = [text[first:last] for first, last in copied_spans(text, copied)]
    assert spans == [" ".join(words[1:9])]
    assert list(copied_spans(" ".join(words[1:8]), copied)) == list(copied_spans(text, NONE)) == []


def test_a_set_without_shared_lines_and_copies_needs_no_pass(tokenizer, tmp_path):
    path = write(tmp_path / "held.jsonl", documents(1))
    assert mark_set(opened(path, tokenizer), DocumentEncoder(tokenizer), NONE) is None


@pytest.mark.parametrize("own_evaluation", [True, False])
def test_copies_are_those_in_documents_that_are_trained_on(tmp_path, own_evaluation):
    held = documents(1, 30)
    path = write(tmp_path / "held.jsonl", held)
    training = write(tmp_path / "train.jsonl", [f"{held[0]} more", *documents(2)])
    filters = [] if own_evaluation else [{"name": "decontaminate", "own_evaluation": False}]
    data = Data(sequence_length=512, sources=[Source(path=str(training))], filters=filters)
    evaluation = Evaluation(perplexity=[HeldOut(name="domain", path=str(path))])
    search = search_training(data, evaluation)
    assert search.contamination.num_contaminated == 1
    assert (len(search.copied) > 0) == (not own_evaluation)


@pytest.fixture
def finished(tiny_recipe, tokenizer, tmp_path):
    """A finished run whose model learned only a part of the held-out documents, which differs by test."""

    def finished(parts, **planted):
        held = write(tmp_path / "held.jsonl", documents(1, 40, **planted))
        training = documents(2, len(parts), **planted)
        tiny_recipe["data"]["sources"] = [{"path": str(write(tmp_path / "t.jsonl", training))}]
        base, run = tmp_path / "base", tmp_path / "run"
        before = random_llama()
        after = learn(before, tokenizer, training, parts)
        of_set = opened(held, tokenizer, length=64)
        for step, (folder, model) in enumerate({base: before, run / "final": after}.items()):
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            losses = document_losses(model, {"domain": of_set.rows}, batch_size=8)
            save_losses(run / "held_out" / f"step-{step}.npz", losses)
        tiny_recipe.update(stage="cpt", model={"path": str(base)})
        tiny_recipe["evaluation"] = {"perplexity": [{"path": str(held), "name": "domain"}]}
        recipe = load_recipe(write_recipe(tiny_recipe, tmp_path / "r.yaml"))
        (run / "recipe.yaml").write_text(dump_recipe(recipe))
        figures = [
            {"step": step, "tokens": step, "eval_domain_bits_per_byte": 2 - step} for step in (0, 1)
        ]
        write_lines(run / "metrics.jsonl", figures)
        (run / "status.json").write_text(json.dumps({"state": "finished"}))
        verdict = complete_verdict(Run(run))
        return verdict, (run / "verdict.md").read_text()

    return finished


def test_a_model_that_learned_the_footer_gained_in_the_footer(finished):
    verdict, page = finished([FOOTER] * 150, footer=FOOTER)
    (gain,) = verdict.gain
    assert verdict.sets[0].outcome == "better" and gain.lines > 0.9 and abs(gain.phrases) < 0.02
    assert (
        f"{100 * min(1, gain.lines):.0f} % of the gain is in lines that most documents share"
        in page
    )
    assert " ".join(FOOTER[:60].split()) in page


@pytest.mark.slow
def test_a_model_that_learned_phrases_of_the_training_text_gained_in_them(finished):
    verdict, page = finished([phrase_of(number) for number in range(100)], has_phrases=True)
    (gain,) = verdict.gain
    assert verdict.sets[0].outcome == "better" and gain.phrases > 0.7 and gain.lines == 0
    assert (
        f"{100 * min(1, gain.phrases):.0f} % of the gain is in phrases of 8 or more words" in page
    )


def test_a_gain_in_words_of_no_common_line_or_phrase_is_not_divided(finished):
    verdict, page = finished(documents(2, 100))
    assert verdict.sets[0].outcome == "better"
    assert verdict.gain == [] and "of the gain" not in page
