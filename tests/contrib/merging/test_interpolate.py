"""`cpt merge --interpolate`: the line between a base and the model trained from it."""

import json

import numpy as np
import pytest
import torch
from tiny import write_recipe
from tiny_checkpoints import save_llama
from transformers import AutoModelForCausalLM, AutoTokenizer

from cpt.contrib.merging import interpolate as module
from cpt.contrib.merging.interpolate import Line, best_point, compare_points, conclusion
from cpt.errors import CheckpointError, DataError
from cpt.evaluation.evaluate import EvaluationRequest, measure
from cpt.evaluation.paired import DocumentLosses
from cpt.evaluation.sets import data_of_texts
from cpt.export.proof import check_seal
from cpt.recipe.schema import Model
from cpt.tokenizer.train_bpe import train_bpe


@pytest.fixture(scope="module")
def trained_folder(tokenizer_folder, tmp_path_factory):
    return save_llama(tmp_path_factory.mktemp("trained") / "llama", tokenizer_folder, seed=2)


@pytest.fixture
def texts(corpus):
    return [f"domain={corpus / 'held_out.jsonl'}", f"general={corpus / 'general.jsonl'}"]


def write_mean(output, dtype, *folders):
    models = [
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64) for folder in folders
    ]
    with torch.no_grad():
        for of_each in zip(*(model.parameters() for model in models), strict=True):
            of_each[0].copy_(torch.stack(of_each).mean(0))
    models[0].to(dtype).save_pretrained(output)
    AutoTokenizer.from_pretrained(folders[0]).save_pretrained(output)
    return output


FP32, BF16 = torch.float32, torch.bfloat16
OTHERS = [pytest.param(pair, marks=pytest.mark.slow) for pair in ((BF16, BF16), (FP32, BF16))]


@pytest.mark.heavy
@pytest.mark.parametrize("dtypes", [(FP32, FP32), *OTHERS])
def test_the_ends_are_both_models_and_the_middle_is_their_stored_mean(
    base_folder, trained_folder, texts, tmp_path, dtypes
):
    base = write_mean(tmp_path / "base", dtypes[0], base_folder)
    trained = write_mean(tmp_path / "trained", dtypes[1], trained_folder)
    middle = write_mean(tmp_path / "middle", dtypes[0], base, trained)
    held = data_of_texts(texts, 64)
    found = Line(Model(path=str(base)), Model(path=str(trained))).walk(
        held, [0, 0.5, 1], {"general"}
    )
    for share, folder in zip(found, (base, middle, trained), strict=True):
        for name, losses in measure(
            Model(path=str(folder)), EvaluationRequest(held)
        ).losses.items():
            assert np.array_equal(found[share][name].nats, losses.nats), (share, name)


@pytest.mark.heavy
def test_points_that_were_measured_are_not_measured_again(
    base_folder, trained_folder, texts, tmp_path, monkeypatch, caplog
):
    measured, measure_losses = [], module.document_losses

    def walk(shares, base=base_folder, sets=texts):
        measured.clear()
        line = Line(Model(path=str(base)), Model(path=str(trained_folder)))
        return line.walk(data_of_texts(sets, 64), shares, {"general"}, tmp_path)

    def document_losses(*arguments, **options):
        if len(measured) == 2:
            raise KeyboardInterrupt
        measured.append(1)
        return measure_losses(*arguments, **options)

    monkeypatch.setattr(module, "document_losses", document_losses)
    caplog.set_level("INFO", logger="cpt")
    with pytest.raises(KeyboardInterrupt):
        walk([0, 0.25, 0.5, 1])
    assert "2 of 4 left to measure, about" in caplog.text
    found = walk([0, 0.25, 0.5, 1])
    assert len(measured) == 2 and list(found) == [0, 0.25, 0.5, 1]
    again = walk([0, 0.25, 0.5, 1])
    assert not measured
    monkeypatch.setattr(module, "document_losses", measure_losses)
    line = Line(Model(path=str(base_folder)), Model(path=str(trained_folder)))
    fresh = line.walk(data_of_texts(texts, 64), [0.25], {"general"})
    for name, losses in fresh[0.25].items():
        assert np.array_equal(losses.nats, again[0.25][name].nats)
    monkeypatch.setattr(module, "document_losses", document_losses)
    walk([0, 1], base=trained_folder)
    assert len(measured) == 2, "another base"
    walk([0, 1], sets=[f"domain={texts[1].partition('=')[2]}"])
    assert len(measured) == 2, "another set"


# --- which points help -----------------------------------------------------------------------------------------------


def points_of(places, kinds=("domain", "general")):
    """Points with these bits per byte of the domain and of general text, of 40 documents that differ a little."""
    number = np.arange(40)
    sizes, hashes = 500 + 20 * number, number.astype(np.uint64)

    def losses(share, bits):
        own = bits + 0.02 * np.sin(
            7 * number + 40 * share
        )  # by which a document differs from model to model
        return DocumentLosses(hashes, sizes, own * sizes * np.log(2), sizes // 4, sizes // 10)

    measured = {
        share: {kind: losses(share, bits) for kind, bits in zip(kinds, place, strict=False)}
        for share, place in places.items()
    }
    return compare_points(measured, {"general"})


def test_the_best_point_keeps_the_gain_and_forgets_least():
    points = points_of(
        {0: (3, 2), 0.5: (2.7, 1.99), 0.75: (2.53, 2.05), 0.9: (2.48, 2.1), 1: (2.5, 2.2)}
    )
    assert [one.helps for one in points] == [False, True, True, True, False]
    assert best_point(points).share == 0.75 and conclusion(points).startswith(
        "Best point: 0.75 keeps 94%"
    )
    assert [one.is_on_frontier(points) for one in points] == [False, True, True, True, False]


@pytest.mark.parametrize(
    "middle",
    [(3.2, 2.5), (2.501, 2.199), (2.7, 2.2)],
    ids=["worse than both", "within the noise of the trained model", "worse than it"],
)
def test_it_says_that_no_point_helps(middle):
    points = points_of({0: (3, 2), 0.5: middle, 1: (2.5, 2.2)})
    assert best_point(points) is None and conclusion(points).startswith("No point helps")


def test_there_is_no_best_point_without_a_domain_gain_or_with_too_little_of_it():
    assert best_point(points_of({0: (3, 2), 0.5: (3.1, 2.05), 1: (3.2, 2.2)})) is None
    points = points_of({0: (3, 2), 0.5: (2.8, 2.05), 1: (2.5, 2.2)})
    assert points[1].helps and best_point(points) is None and "90%" in conclusion(points)


def test_without_general_text_it_says_so():
    points = points_of({0: (3,), 0.5: (2.4,), 1: (2.5,)})
    assert (
        points[1].general is None
        and best_point(points) is None
        and "`evaluation.retain`" in conclusion(points)
    )


# --- the command -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_names_its_base_and_its_held_out_sets(
    base_folder, trained_folder, corpus, tiny_recipe, tmp_path, cpt
):
    sets = [
        {"path": str(corpus / f"{name}.jsonl"), "name": name} for name in ("held_out", "general")
    ]
    tiny_recipe |= {"stage": "cpt", "model": {"path": str(base_folder)}, "tokenizer": {}}
    tiny_recipe["evaluation"] = {"perplexity": sets, "retain": {"general": None}}
    write_recipe(tiny_recipe, tmp_path / "recipe.yaml")
    (tmp_path / "final").symlink_to(trained_folder)
    code, said = cpt(
        "merge", "--interpolate", tmp_path, "--points", 3, "--point", 0.25, "-o", tmp_path / "new"
    )
    assert code == 0, said
    found = json.loads((tmp_path / "interpolation.json").read_text())
    assert [one["share"] for one in found["points"]] == [0, 0.25, 0.5, 1] and found[
        "conclusion"
    ] in said
    assert (tmp_path / "interpolation.svg").read_text().startswith("<svg")
    written, base, trained = (
        AutoModelForCausalLM.from_pretrained(folder).lm_head.weight
        for folder in (check_seal(tmp_path / "new"), base_folder, trained_folder)
    )
    assert (
        torch.equal(written, 0.75 * base + 0.25 * trained)
        and (tmp_path / "new/README.md").is_file()
    )


def test_unlike_models_are_refused(base_folder, tokenizer_folder, corpus, tmp_path):
    words = [
        json.loads(line)["text"] for line in (corpus / "general.jsonl").read_text().splitlines()
    ]
    train_bpe(words, 320, tmp_path / "words")
    others = {
        "intermediate|mlp": save_llama(
            tmp_path / "wide", tokenizer_folder, 3, intermediate_size=96
        ),
        "layers.1": save_llama(tmp_path / "flat", tokenizer_folder, 3, num_hidden_layers=1),
        "tie_word_embeddings": save_llama(
            tmp_path / "tied", tokenizer_folder, 3, tie_word_embeddings=True
        ),
        "embed_tokens.*extend": save_llama(tmp_path / "grown", tokenizer_folder, 3, vocab_size=384),
        "tokenizer": save_llama(tmp_path / "words-model", tmp_path / "words", 3),
    }
    for named, folder in others.items():
        with pytest.raises(CheckpointError, match=named):
            Line(Model(path=str(base_folder)), Model(path=str(folder)))


def test_general_sets_alone_are_refused(base_folder, texts):
    line = Line(Model(path=str(base_folder)), Model(path=str(base_folder)))
    with pytest.raises(DataError, match="general"):
        line.walk(data_of_texts(texts[1:], 64), [0, 1], {"general"})


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--interpolate"], "--text general"),
        (["--interpolate", "BASE"], "a run that has a base"),
        (["--interpolate", "BASE", "BASE"], "--text domain"),
        (["--interpolate", "BASE", "./nothing", "--text", "domain=x.jsonl"], "nothing"),
        (
            ["--interpolate", "BASE", "ADAPTER", "--text", "domain=x.jsonl"],
            "adapter without its base",
        ),
        (["--interpolate", "BASE", "--points", "2"], "--points"),
        (["--interpolate", "BASE", "--point", "0.5"], "--point: no effect without --output"),
        (["--interpolate", "BASE", "--point", "1.5", "-o", "new"], "--point"),
        (["--interpolate", "--method", "average", "BASE"], "--method: no effect"),
        (
            ["--method", "average", "BASE", "BASE", "--points", "5", "-o", "new"],
            "--points: no effect",
        ),
        (["BASE", "BASE"], "--method or --output"),
    ],
)
def test_what_has_no_line_is_refused(
    base_folder, adapter_folder, tmp_path, monkeypatch, cpt, words, named
):
    monkeypatch.chdir(tmp_path)
    folders = {"BASE": str(base_folder), "ADAPTER": str(adapter_folder)}
    code, said = cpt("merge", *(folders.get(word, word) for word in words))
    assert code == 2 and named in said and not list(tmp_path.iterdir())
