"""Verdicts: metrics equal those of plain transformers; success, harm and forgetting are reported only where intervals
show them."""

import json
import math
import random
import shutil
from pathlib import Path

import pytest
import torch
from promises.conftest import metrics, texts_in, write_texts
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from cpt import evaluate_model, load_recipe
from cpt.errors import DataError
from cpt.train import train

pytestmark = pytest.mark.heavy
DOMAIN = ["the", "model", "reads", "a", "document", "and", "learns"]
DOMAIN += ["which", "word", "comes", "after", "other", "words"]
GENERAL = ["of", "its", "domain", "text", "words", "which", "other", "learns", "a"]


def documents(words: list[str], count: int, seed: int, *, longest: int = 20) -> list[str]:
    """Texts in which 90 % of the words are followed by the next word of the list: a pattern to learn."""
    draw, texts = random.Random(seed), []
    for _ in range(count):
        place = draw.randrange(len(words))
        written = []
        for _ in range(draw.randint(9, longest)):
            place = (place + 1 if draw.random() < 0.9 else draw.randrange(99)) % len(words)
            written.append(words[place])
        texts.append(" ".join(written))
    return texts


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> Path:
    """A folder of domain.jsonl, general.jsonl, and what is held out of each."""
    folder = tmp_path_factory.mktemp("texts")
    for seed, (name, words) in enumerate({"domain": DOMAIN, "general": GENERAL}.items()):
        write_texts(folder / f"{name}.jsonl", documents(words, 160, seed))
        write_texts(folder / f"held_{name}.jsonl", documents(words, 40, seed + 10))
    return folder


def nats_by_hand(folder: Path, file: Path, length: int = 128) -> tuple[list[float], list[int]]:
    """Per document: the negative log-likelihood of all tokens except the first, in windows of this length that share
    a token, and the number of bytes."""
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(folder),
        AutoTokenizer.from_pretrained(folder),
    )
    nats, sizes = [], []
    for text in texts_in(file):
        ids = torch.tensor([*tokenizer(text)["input_ids"], tokenizer.eos_token_id])
        sums = []
        for begin in range(0, len(ids) - 1, length - 1):
            window = ids[begin : begin + length]
            with torch.no_grad():
                logits = model.eval()(window[None]).logits[0, :-1].double()
            sums.append(float(F.cross_entropy(logits, window[1:], reduction="sum")))
        nats.append(sum(sums))
        sizes.append(len(text.encode()))
    return nats, sizes


def exchange_neurons(mlp: torch.nn.Module) -> None:
    """Other weights of the same function."""
    order = torch.randperm(mlp.down_proj.in_features)
    mlp.gate_proj.weight.copy_(mlp.gate_proj.weight[order])
    mlp.up_proj.weight.copy_(mlp.up_proj.weight[order])
    mlp.down_proj.weight.copy_(mlp.down_proj.weight[:, order])


@pytest.fixture(scope="module")
def changed(base_model, texts, tmp_path_factory):
    """Models made from the base: one that learned the domain, one that was damaged, and one as good as the base."""
    folder = tmp_path_factory.mktemp("changed")
    tokenizer = AutoTokenizer.from_pretrained(base_model)
    lines = texts_in(texts / "domain.jsonl")
    for name in ("better", "worse", "equal"):
        model = AutoModelForCausalLM.from_pretrained(base_model)
        torch.manual_seed(1)
        if name == "better":
            optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
            for first in range(0, 160, 16):
                rows = tokenizer(lines[first : first + 16], return_tensors="pt", padding=True)
                labels = rows["input_ids"].masked_fill(rows["attention_mask"] == 0, -100)
                model(**rows, labels=labels).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += (0.3 if name == "worse" else 0) * torch.randn_like(parameter)
            for layer in model.model.layers if name == "equal" else ():
                exchange_neurons(layer.mlp)
        shutil.copytree(base_model, folder / name)
        model.save_pretrained(folder / name)
    return folder


def test_bits_per_byte_are_those_of_a_loop_in_plain_transformers(changed, texts):
    (found,) = evaluate_model(
        changed / "better", {"held": texts / "held_domain.jsonl"}, sequence_length=128
    )["sets"]
    nats, sizes = nats_by_hand(changed / "better", texts / "held_domain.jsonl")
    assert found["documents"] == len(nats) == 40 and found["num_bytes"] == sum(sizes)
    assert found["bits_per_byte"] == pytest.approx(sum(nats) / math.log(2) / sum(sizes), rel=1e-5)
    assert found["loss"] == pytest.approx(sum(nats) / found["tokens"], rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]), rel=1e-5)


def test_the_interval_of_a_difference_is_that_of_a_bootstrap_over_documents(
    base_model, changed, texts
):
    held = texts / "held_domain.jsonl"
    (found,) = evaluate_model(
        changed / "better", {"held": held}, against=base_model, sequence_length=128
    )["sets"]
    (before, sizes), (after, _) = (
        nats_by_hand(base_model, held),
        nats_by_hand(changed / "better", held),
    )
    bits, sizes = (torch.tensor(after) - torch.tensor(before)) / math.log(2), torch.tensor(sizes)
    drawn = torch.randint(0, 40, (4000, 40), generator=torch.Generator().manual_seed(0))
    low, high = torch.quantile(
        bits[drawn].sum(1) / sizes[drawn].sum(1), torch.tensor([0.025, 0.975])
    ).tolist()
    against = found["against"]
    assert against["difference"] == pytest.approx(float(bits.sum() / sizes.sum()), rel=1e-4)
    assert against["items"] == 40 and against["num_worse"] == int((bits > 0).sum())
    assert (against["low"], against["high"]) == pytest.approx((low, high), abs=0.15 * (high - low))


@pytest.mark.parametrize(
    "name", ["better", *(pytest.param(name, marks=pytest.mark.slow) for name in ("worse", "equal"))]
)
def test_a_planted_difference_is_reported_as_what_it_is(name, base_model, changed, texts, cpt):
    words = (
        "--against",
        base_model,
        "--text",
        f"held={texts}/held_domain.jsonl",
        "--sequence-length",
        128,
        "--json",
    )
    ended = cpt("evaluate", changed / name, *words)
    assert ended.returncode == 0, ended.output
    (found,) = json.loads(ended.stdout)["sets"]
    low, high = found["against"]["low"], found["against"]["high"]
    assert {"better": high < 0, "worse": low > 0, "equal": low > -1e-6 and high < 1e-6}[name]
    outcome = found["verdict"].split(": ")[1]
    assert outcome == (name if name != "equal" else "no change found")


def test_documents_longer_than_a_row_are_evaluated_to_their_end(changed, texts):
    model = changed / "worse"  # its loss depends on the context most
    held = {"held": texts / "held_domain.jsonl"}
    short, long = (
        evaluate_model(model, held, sequence_length=length)["sets"][0] for length in (8, 128)
    )
    assert (short["tokens"], short["num_bytes"]) == (long["tokens"], long["num_bytes"])
    nats, _ = nats_by_hand(model, texts / "held_domain.jsonl", length=8)
    assert short["loss"] == pytest.approx(sum(nats) / short["tokens"], rel=1e-5)
    assert short["loss"] != pytest.approx(long["loss"], rel=1e-4), "no document is longer"


def test_nothing_is_concluded_from_a_few_documents(base_model, changed, texts, tmp_path):
    few = write_texts(tmp_path / "few.jsonl", texts_in(texts / "held_domain.jsonl")[:6])
    (found,) = evaluate_model(
        changed / "better", {"few": few}, against=base_model, sequence_length=128
    )["sets"]
    assert found["against"]["items"] == 6 and found["verdict"].partition(": ")[2].startswith(
        "unknown"
    )


def test_texts_that_cannot_be_evaluated_are_refused(base_model, texts, tmp_path, cpt):
    with pytest.raises(DataError):
        evaluate_model(base_model, {"held": tmp_path / "nowhere.jsonl"})
    one = write_texts(tmp_path / "one.jsonl", ["the model reads a document and learns"])
    with pytest.raises(DataError):
        evaluate_model(base_model, {"held": one}, against=base_model, sequence_length=128)
    assert cpt("evaluate", base_model, "--text", "held=nowhere.jsonl").returncode == 2


@pytest.fixture
def continued(recipe, base_model, texts, tmp_path):
    """Continued pre-training of the base on domain text, with held-out sets of both kinds."""
    sets = [
        {"path": str(texts / f"held_{name}.jsonl"), "name": name} for name in ("domain", "general")
    ]
    tasks = [{"name": "domain_test", "questions": 0}]
    return {
        **recipe,
        "stage": "cpt",
        "model": {"path": str(base_model)},
        "tokenizer": {},
        "data": {"sequence_length": 128, "sources": [{"path": str(texts / "domain.jsonl")}]},
        "budget": {"tokens": 20 * 512, "global_batch_tokens": 512},
        "evaluation": {"perplexity": sets, "retain": {"general": None}, "tasks": tasks},
    }


def verdict_of(run: Path) -> dict:
    return json.loads((run / "verdict.json").read_text())


def test_it_worked_only_where_the_interval_says_so(continued, texts, write):
    """One run learns the domain; one learns random words at a rate that moves no figure: its tiny gain may be certain,
    and is none."""
    noise = random.Random(0)
    write_texts(
        texts / "noise.jsonl", [" ".join(noise.choices(DOMAIN + GENERAL, k=20)) for _ in range(80)]
    )
    for name, rate, source in (("learns", 3e-3, "domain"), ("idles", 1e-9, "noise")):
        continued["data"]["sources"] = [{"path": str(texts / f"{source}.jsonl")}]
        run = train(
            load_recipe(write({**continued, "name": name, "optimizer": {"learning_rate": rate}}))
        ).parent
        found = verdict_of(run)
        is_better = (
            found["domain"]["high"] < 0
            and found["domain"]["low"] < -0.001 * found["domain"]["before"]
        )
        assert (found["worked"] is True) == is_better == (name == "learns")
        assert (run / "verdict.md").read_text().partition("**")[2].startswith(
            "It worked"
        ) == is_better


@pytest.mark.slow
def test_harm_is_reported_as_harm(continued, texts, write):
    """Training on one kind of text makes the other kind worse."""
    continued["data"]["sources"] = [{"path": str(texts / "general.jsonl")}]
    continued["model"]["path"] = str(train(load_recipe(write({**continued, "name": "base"}))))
    continued["data"]["sources"] = [{"path": str(texts / "domain.jsonl")}]
    del continued["evaluation"]["retain"]
    continued["evaluation"]["perplexity"] = continued["evaluation"]["perplexity"][1:]
    found = verdict_of(
        train(load_recipe(write({**continued, "optimizer": {"learning_rate": 1e-2}}))).parent
    )
    assert found["worked"] is False and found["domain"]["low"] > 0


@pytest.mark.slow
def test_forgetting_is_reported_and_stops_a_run_where_the_recipe_says_so(continued, texts, write):
    continued["data"]["sources"] = [{"path": str(texts / "general.jsonl")}]
    budget = {"tokens": 40 * 512, "global_batch_tokens": 512}
    base = train(load_recipe(write({**continued, "name": "base", "budget": budget})))
    continued |= {"model": {"path": str(base)}, "optimizer": {"learning_rate": 1e-2}}
    continued["data"]["sources"] = [{"path": str(texts / "domain.jsonl")}]
    continued["evaluation"] |= {"retain": {"general": 0.02}, "every_steps": 4}
    run = train(load_recipe(write(continued))).parent
    found = verdict_of(run)
    assert (
        found["general"]["low"] > 0
        and next(one for one in found["sets"] if one["name"] == "general")["is_general"]
    )
    assert max(row["step"] for row in metrics(run, having="step")) < 20 and found["stopped"]


def test_a_run_ends_with_its_verdict_on_one_page(continued, write, cpt):
    ended = cpt("train", write(continued))
    assert ended.returncode == 0, ended.output
    run = Path(continued["output_dir"]) / "run"
    found = verdict_of(run)
    assert found["is_complete"] and found["contamination"]["evaluated"] >= 70
    assert {one["name"]: one["documents"] for one in found["sets"]} == {"domain": 40, "general": 40}
    held = {"d": continued["evaluation"]["perplexity"][0]["path"]}
    folders = continued["model"]["path"], run
    by_hand = [
        evaluate_model(folder, held, sequence_length=128)["sets"][0]["bits_per_byte"]
        for folder in folders
    ]
    domain = next(one for one in found["sets"] if one["name"] == "domain")
    assert [domain["before"], domain["after"]] == pytest.approx(by_hand, rel=1e-4)


def test_planted_contamination_is_found_by_file_and_line_and_removed_by_a_filter(
    recipe, tmp_path, write, cpt
):
    planted = " ".join(f"word{number} and" for number in range(30))
    clean = [*documents(DOMAIN, 8, 3), planted.replace("word", "other")]
    dirty = write_texts(tmp_path / "dirty.jsonl", [*clean, f"as it is said {planted} and so on"])
    exam = write_texts(tmp_path / "exam.jsonl", [planted])
    recipe["data"]["sources"] = [{"path": str(dirty)}]
    recipe["evaluation"] = {"perplexity": [{"path": str(exam), "name": "exam"}]}
    ended = cpt("contamination", write(recipe), "--json")
    assert ended.returncode == 2 and json.loads(ended.stdout)["contaminated"] == 1
    assert f"{dirty}:10" in ended.stdout and f"{exam}:1" in ended.stdout
    recipe["data"]["filters"] = [{"name": "decontaminate", "against": [str(exam)]}]
    assert cpt("contamination", write(recipe)).returncode == 0


def test_contamination_inside_a_longer_document_is_found_and_common_phrases_are_not(
    recipe, tmp_path, write, cpt
):
    common = " ".join(f"shared{number}" for number in range(13))
    questions = [" ".join(f"word{n}of{number}" for n in range(20)) for number in range(20)]
    exam = write_texts(tmp_path / "exam.jsonl", [f"{common} {question}" for question in questions])
    filler = " ".join(documents(DOMAIN, 20, 3))
    dirty = write_texts(
        tmp_path / "dirty.jsonl", [f"{filler} {questions[3]} {filler}", f"{filler} {common} a b c"]
    )
    recipe["data"]["sources"] = [{"path": str(dirty)}]
    recipe["evaluation"] = {"perplexity": [{"path": str(exam), "name": "exam"}]}
    found = json.loads(cpt("contamination", write(recipe), "--json").stdout)
    assert found["contaminated"] == 1 and found["hits"][0]["where"] == f"{dirty}:1"
