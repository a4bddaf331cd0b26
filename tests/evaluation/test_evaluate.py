import json
from dataclasses import replace

import pytest
import torch
from tiny import TINY_LLAMA
from transformers import LlamaConfig, LlamaForCausalLM

from cpt.data.rows.held_out import HeldOutSet
from cpt.errors import CheckpointError, DataError, RecipeError
from cpt.evaluation.evaluate import EvaluationRequest, measure, model_at, of_texts
from cpt.evaluation.paired import bits_per_byte_difference
from cpt.evaluation.sets import EvaluationSet, data_of_texts
from cpt.recipe.schema import Model, Tokenizer
from cpt.tokenizer.load import load_tokenizer
from cpt.tokenizer.train_bpe import train_bpe


@pytest.fixture(scope="module")
def models(corpus, tokenizer_folder, tmp_path_factory):
    """Two models, the second with a tokenizer of its own."""
    folder = tmp_path_factory.mktemp("models")
    texts = [json.loads(line)["text"] for line in (corpus / "general.jsonl").read_text().splitlines()]
    load_tokenizer(Tokenizer(path=str(tokenizer_folder)), Model(path="unused")).save_pretrained(folder / "one")
    train_bpe(texts, 290, folder / "two")
    for seed, name in enumerate(("one", "two")):
        torch.manual_seed(seed)
        LlamaForCausalLM(LlamaConfig(**TINY_LLAMA, initializer_range=0.3)).save_pretrained(folder / name)
    return folder


@pytest.fixture
def asked(corpus):
    return EvaluationRequest(data_of_texts([f"held={corpus / 'held_out.jsonl'}"], 64))


def test_models_of_different_tokenizers_are_compared_by_document(models, asked):
    one, two = (measure(Model(path=str(models / name)), asked).losses["held"] for name in ("one", "two"))
    assert one.num_tokens.tolist() != two.num_tokens.tolist() and one.hashes.tolist() == two.hashes.tolist()
    found = bits_per_byte_difference([one], [two])
    assert found.items == 12 and found.difference == pytest.approx(
        two.figures()["bits_per_byte"] - one.figures()["bits_per_byte"]
    )


def test_a_runs_folder_stands_for_its_model(models, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "final").symlink_to(models / "one")
    assert model_at(str(run)).path == str(run / "final")
    (run / "final").unlink()
    (run / "recipe.yaml").write_text("")
    with pytest.raises(CheckpointError, match="has no finished model"):
        model_at(str(run))


def test_an_adapter_alone_is_refused(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="is an adapter without its base"):
        model_at(str(tmp_path))


@pytest.mark.parametrize("path", ["./nothing", "/no/such/model", "nothing"])
def test_a_model_that_is_not_there_is_told(path):
    with pytest.raises(CheckpointError, match="there is no model"):
        model_at(path)


def test_rows_longer_than_the_model_knows_are_refused(models, corpus):
    with pytest.raises(RecipeError, match="longer than the 128 positions.*--sequence-length 128"):
        measure(
            Model(path=str(models / "one")),
            EvaluationRequest(data_of_texts([f"held={corpus / 'held_out.jsonl'}"], 256)),
        )


def test_a_domain_test_of_a_set_that_is_not_there_is_refused(models, asked):
    with pytest.raises(DataError, match="domain.*held"):
        measure(Model(path=str(models / "one")), EvaluationRequest(asked.held_out, domain_test=["domain"]))


def test_a_domain_test_needs_enough_documents(models, asked):
    with pytest.raises(DataError, match=r"the domain test needs 30 \w+ questions, but 12 held-out document\(s\) give"):
        measure(Model(path=str(models / "one")), EvaluationRequest(asked.held_out, domain_test=["held"]))


def test_one_document_is_refused_before_two_models_are_loaded(models, corpus, tmp_path):
    (tmp_path / "one.jsonl").write_text((corpus / "held_out.jsonl").read_text().splitlines()[0])
    judges = data_of_texts([f"held={tmp_path / 'one.jsonl'}"], 64)
    with pytest.raises(
        DataError, match="`held` has one document.*2 are needed at least, 20 for an interval to mean much"
    ):
        measure(Model(path=str(models / "one")), EvaluationRequest(judges, is_compared=True))
    assert (
        measure(Model(path=str(models / "one")), EvaluationRequest(judges)).losses["held"].figures()["bits_per_byte"]
        > 0
    )


def test_pairs_are_left_to_the_run_that_measured_them(caplog):
    held = HeldOutSet("a", [], 3)
    sets = {"texts": EvaluationSet(held, None), "pairs": EvaluationSet(replace(held, form="preference"), None)}
    with caplog.at_level("INFO", "cpt"):
        assert list(of_texts(sets, EvaluationRequest())) == ["texts"]
    assert "held-out pairs and prompts (pairs) are measured by the run" in caplog.text
    with pytest.raises(DataError, match="--text domain=held_out.jsonl"):
        of_texts({"pairs": sets["pairs"]}, EvaluationRequest())
