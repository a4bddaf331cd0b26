import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from full_disk import disk_of_its_own, fill
from peft import LoraConfig, get_peft_model
from tiny import TINY_LLAMA
from transformers import LlamaConfig, LlamaForCausalLM
from xxhash import xxh3_64_intdigest

from cpt.evaluation import scoring
from cpt.evaluation.paired import load_losses, saved_losses
from cpt.evaluation.scoring import document_losses, evaluation_mode, measure_and_keep
from cpt.evaluation.sets import EvaluationData, data_of_texts, open_evaluation_sets
from cpt.recipe.schema import Model, Tokenizer
from cpt.runs.events import read_events, write_waiting_events
from cpt.tokenizer.load import load_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folder):
    return load_tokenizer(Tokenizer(path=str(tokenizer_folder)), Model(path="unused"))


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**TINY_LLAMA, initializer_range=0.3)).eval()


@pytest.fixture(scope="module")
def texts(corpus):
    return [json.loads(line)["text"] for line in (corpus / "held_out.jsonl").read_text().splitlines()]


def sets(corpus, tokenizer, packing="best_fit", sequence_length=64):
    judges = data_of_texts([f"held={corpus / 'held_out.jsonl'}"], sequence_length)
    opened = open_evaluation_sets(
        EvaluationData(judges.data.model_copy(update={"packing": packing}), judges.evaluation), tokenizer
    )
    return {name: of_set.rows for name, of_set in opened.items()}


def by_hand(model, tokenizer, text, window):
    """(nats, tokens, correct): windows that overlap by one token, one after the other, each by itself."""
    ids = torch.tensor(tokenizer(text)["input_ids"] + [tokenizer.eos_token_id])
    assert ids[0] == tokenizer.bos_token_id, "this tokenizer adds one"
    nats, tokens, correct = 0.0, 0, 0
    for start in range(0, max(1, len(ids) - 1), window - 1):
        piece = ids[start : start + window]
        with torch.no_grad():
            logits = model(input_ids=piece[None], use_cache=False).logits[0, :-1]
        nats += F.cross_entropy(logits.double(), piece[1:], reduction="sum").item()
        tokens, correct = tokens + len(piece) - 1, correct + int((logits.argmax(-1) == piece[1:]).sum())
    return nats, tokens, correct


@pytest.mark.parametrize(
    ("packing", "batch_size"), [("best_fit", 1), ("best_fit", 5), ("none", 3), ("token_budget", 2)]
)
def test_each_documents_losses_equal_a_loop_by_hand_whatever_packing_and_batch_size(
    corpus, tokenizer, model, texts, packing, batch_size
):
    found = document_losses(model, sets(corpus, tokenizer, packing), batch_size=batch_size)["held"]
    expected = np.array([by_hand(model, tokenizer, text, 64) for text in texts])
    assert found.hashes.tolist() == [xxh3_64_intdigest(text.encode()) for text in texts]
    assert found.num_bytes.tolist() == [len(text.encode()) for text in texts]
    assert found.nats == pytest.approx(expected[:, 0], rel=1e-6)
    assert (
        found.num_tokens.tolist() == expected[:, 1].tolist() and found.num_correct.tolist() == expected[:, 2].tolist()
    )
    assert max(found.num_tokens) > 64, "a document longer than a row is among them"
    assert found.figures()["bits_per_byte"] == pytest.approx(
        expected[:, 0].sum() / np.log(2) / found.num_bytes.sum(), rel=1e-6
    )


def test_a_run_keeps_what_each_evaluation_found(corpus, tokenizer, model, tmp_path):
    held_out = sets(corpus, tokenizer)
    for step in (0, 5, 10):
        figures = measure_and_keep(model, held_out, batch_size=4, run_folder=tmp_path, step=step)
    expected = document_losses(model, held_out, batch_size=4)["held"]
    assert figures["held_bits_per_byte"] == pytest.approx(expected.figures()["bits_per_byte"])
    assert list(saved_losses(tmp_path)) == [0, 10]
    kept = load_losses(saved_losses(tmp_path)[0])["held"]
    assert kept.nats.tolist() == document_losses(model, held_out, batch_size=4)["held"].nats.tolist()


def test_on_a_full_disk_the_figures_come_and_nothing_stale_is_taken_for_the_last(
    corpus, tokenizer, model, tmp_path, caplog
):
    held_out = sets(corpus, tokenizer)
    with disk_of_its_own(tmp_path / "disk", "256k") as disk:
        for step in (0, 5):
            measure_and_keep(model, held_out, batch_size=4, run_folder=disk, step=step)
        ballast = fill(disk)
        figures = measure_and_keep(model, held_out, batch_size=4, run_folder=disk, step=10)
        expected = document_losses(model, held_out, batch_size=4)["held"]
        assert figures["held_bits_per_byte"] == pytest.approx(expected.figures()["bits_per_byte"])
        assert list(saved_losses(disk)) == [0] and load_losses(saved_losses(disk)[0])
        assert "at step 10 are not kept: No space left on device" in caplog.text
        ballast.unlink()
        write_waiting_events(disk)
        assert [(event["kind"], event["step"]) for event in read_events(disk)] == [("not_written", 10)]
        assert not list(disk.rglob(".step*"))


def test_an_evaluation_can_be_left_after_any_batch(corpus, tokenizer, model, tmp_path):
    batches = []

    def leave():
        batches.append(1)
        if len(batches) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure_and_keep(model, sets(corpus, tokenizer), batch_size=1, run_folder=tmp_path, step=3, after_batch=leave)
    assert len(batches) == 2 and saved_losses(tmp_path) == {} and not model.training


def bits(model, held_out):
    return document_losses(model, held_out, batch_size=2)["held"].figures()["bits_per_byte"]


def tiny_model(dropout=0.0):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**TINY_LLAMA, initializer_range=0.3, attention_dropout=dropout))


def test_logits_in_chunks_give_the_same_figures(corpus, tokenizer, model, monkeypatch):
    held_out = sets(corpus, tokenizer)
    whole = bits(model, held_out)
    monkeypatch.setattr(scoring, "POSITIONS_AT_ONCE", 4)
    assert bits(model, held_out) == pytest.approx(whole, rel=1e-9)


def test_a_uniform_model_needs_log2_of_the_vocabulary_for_each_token(corpus, tokenizer):
    model, held_out = tiny_model(), sets(corpus, tokenizer)
    with torch.no_grad():
        model.lm_head.weight.zero_()
        assert document_losses(model, held_out, batch_size=4)["held"].figures()["perplexity"] == pytest.approx(
            model.config.vocab_size, rel=1e-5
        )


def test_training_goes_on_as_if_there_had_been_no_evaluation(corpus, tokenizer):
    model, held_out = tiny_model(dropout=0.5).train(), sets(corpus, tokenizer)
    random_state = torch.get_rng_state()
    first = bits(model, held_out)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(module.training for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert bits(model, held_out) == first  # no dropout inside


def test_a_peft_model_is_measured_with_its_adapter(corpus, tokenizer):
    model, held_out = tiny_model(), sets(corpus, tokenizer)
    plain = bits(model, held_out)
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    assert bits(adapted, held_out) != pytest.approx(plain, rel=1e-3)


def test_each_module_gets_its_own_mode_back_even_after_an_error():
    model = torch.nn.Sequential(torch.nn.Dropout(), torch.nn.Sequential(torch.nn.Dropout()))
    model.train()
    model[1].eval()  # a frozen part
    with pytest.raises(KeyError), evaluation_mode(model):
        assert not any(module.training for module in model.modules()) and not torch.is_grad_enabled()
        raise KeyError
    assert [module.training for module in model.modules()] == [True, True, False, False]
    assert torch.is_grad_enabled()
