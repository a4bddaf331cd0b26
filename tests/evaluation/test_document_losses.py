import json
import math
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from full_disk import disk_of_its_own, fill
from peft import LoraConfig, get_peft_model
from threads_as_ranks import on_ranks
from tiny import TINY_LLAMA
from tiny_checkpoints import random_llama

from cpt.data.store.tokenization import adds_bos
from cpt.errors import DataError
from cpt.evaluation.paired import DocumentLosses, load_losses, save_losses, saved_losses
from cpt.evaluation.scoring import document_losses, evaluation_mode, measure_and_keep
from cpt.evaluation.sets import data_of_texts, open_evaluation_sets
from cpt.models.build import build_model
from cpt.recipe.schema import Model
from cpt.runs.events import read_events, write_waiting_events


@pytest.fixture(scope="module")
def model():
    return random_llama()


@pytest.fixture
def held_out(corpus, tokenizer):
    return sets(corpus, tokenizer)


def sets(corpus, tokenizer, packing="best_fit"):
    held = data_of_texts([f"held={corpus / 'held_out.jsonl'}"], 64)
    held = replace(held, data=held.data.model_copy(update={"packing": packing}))
    return {name: of_set.rows for name, of_set in open_evaluation_sets(held, tokenizer).items()}


def bits(model, held_out):
    return document_losses(model, held_out, batch_size=2)["held"].metrics()["bits_per_byte"]


def test_training_continues_as_if_there_had_been_no_evaluation(held_out):
    model = random_llama(attention_dropout=0.5).train()
    random_state = torch.get_rng_state()
    first = bits(model, held_out)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(module.training for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert bits(model, held_out) == first  # no dropout inside


@pytest.mark.parametrize("packing", ["best_fit", "token_budget", "none"])
def test_each_document_has_the_losses_of_plain_transformers(
    packing, corpus, tokenizer, monkeypatch
):
    """Whatever the batch, and with the fused loss as without it."""
    config = {**TINY_LLAMA, "vocab_size": len(tokenizer), "initializer_range": 0.3}
    of_set = sets(corpus, tokenizer, packing)
    found = []
    for fused in (False, True, None):
        section = Model(from_scratch=True, config=config, fused_loss=bool(fused))
        model = build_model(section, tokenizer, packed=packing != "token_budget")
        if fused is None:  # as for a family that needs all logits
            monkeypatch.setattr("cpt.evaluation.scoring.fused_scores", lambda _: nullcontext())
        found += [document_losses(model, of_set, batch_size=size)["held"] for size in (1, 3, 99)]
    texts = [
        json.loads(line)["text"] for line in (corpus / "held_out.jsonl").read_text().splitlines()
    ]
    expected = []
    for text in texts:
        ids = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        if adds_bos(tokenizer):
            ids = [tokenizer.bos_token_id, *ids]
        nats, correct = 0.0, 0
        for first in range(0, len(ids) - 1, 63):  # rows share a token, so that each is predicted
            piece = torch.tensor(ids[first : first + 64])
            with torch.no_grad():
                logits = model(input_ids=piece[None], use_cache=False).logits[0, :-1]
            nats += torch.nn.functional.cross_entropy(logits, piece[1:], reduction="sum").item()
            correct += int((logits.argmax(-1) == piece[1:]).sum())
        expected.append((len(text.encode()), nats, correct))
    for losses in found:
        assert losses.num_bytes.tolist() == [size for size, _, _ in expected]
        if packing != "best_fit":  # which may cut a document elsewhere
            assert losses.nats == pytest.approx([nats for _, nats, _ in expected], rel=1e-4)
            assert losses.num_correct.tolist() == [correct for _, _, correct in expected]
        assert losses.nats == pytest.approx(found[0].nats, rel=1e-4)
        assert losses.num_tokens.tolist() == found[0].num_tokens.tolist()
        assert losses.num_correct.tolist() == found[0].num_correct.tolist()


def test_several_processes_have_the_losses_of_one(held_out, model):
    """Also where one of them has more rows than another, or none."""
    alone = document_losses(model, held_out, batch_size=2)["held"]
    for count in (3, len(held_out["held"].rows) + 2):
        models = [random_llama() for _ in range(count)]
        of_ranks = on_ranks(
            count, lambda rank, of=models: document_losses(of[rank], held_out, batch_size=2)["held"]
        )
        for losses in of_ranks:
            assert losses.nats == pytest.approx(alone.nats, rel=1e-6)
            assert losses.num_tokens.tolist() == alone.num_tokens.tolist()
            assert losses.num_correct.tolist() == alone.num_correct.tolist()


def test_a_peft_model_is_measured_with_its_adapter(held_out):
    model = random_llama()
    plain = bits(model, held_out)
    adapted = get_peft_model(
        model, LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    )
    assert bits(adapted, held_out) != pytest.approx(plain, rel=1e-3)


def test_each_module_gets_its_own_mode_back_even_after_an_error():
    model = torch.nn.Sequential(torch.nn.Dropout(), torch.nn.Sequential(torch.nn.Dropout())).train()
    model[1].eval()  # a frozen part
    with pytest.raises(KeyError), evaluation_mode(model):
        assert (
            not any(module.training for module in model.modules()) and not torch.is_grad_enabled()
        )
        raise KeyError
    assert [module.training for module in model.modules()] == [True, True, False, False]
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("tokens", [[0, 0, 0], [0, 3, 0]])
def test_a_set_without_a_token_to_predict_is_refused(model, monkeypatch, tokens):
    of_set = DocumentLosses(
        *[np.array(values) for values in ([1, 2, 3], [1, 9, 1], tokens, tokens, tokens)]
    )
    monkeypatch.setattr("cpt.evaluation.scoring.losses_of_set", lambda *arguments: of_set)
    if any(tokens):
        assert document_losses(model, {"held": None}, batch_size=2) == {"held": of_set}
        return
    with pytest.raises(DataError, match="`held` has only documents of fewer than two tokens"):
        document_losses(model, {"held": None}, batch_size=2)


# In a run's folder


def test_a_run_keeps_the_losses_of_its_first_and_last_evaluation(held_out, model, tmp_path):
    for step in (0, 5, 10):
        figures = measure_and_keep(model, held_out, batch_size=4, run_folder=tmp_path, step=step)
    expected = document_losses(model, held_out, batch_size=4)["held"]
    assert figures["held_bits_per_byte"] == pytest.approx(expected.metrics()["bits_per_byte"])
    assert list(saved_losses(tmp_path)) == [0, 10]
    assert load_losses(saved_losses(tmp_path)[0])["held"].nats.tolist() == expected.nats.tolist()


def test_on_a_full_disk_the_figures_come_and_nothing_stale_is_taken_for_the_last(
    held_out, model, tmp_path, caplog
):
    with disk_of_its_own(tmp_path / "disk", "256k") as disk:
        for step in (0, 5):
            measure_and_keep(model, held_out, batch_size=4, run_folder=disk, step=step)
        ballast = fill(disk)
        figures = measure_and_keep(model, held_out, batch_size=4, run_folder=disk, step=10)
        assert figures["held_bits_per_byte"] > 0
        assert list(saved_losses(disk)) == [0] and load_losses(saved_losses(disk)[0])
        assert "No space left" in caplog.text
        ballast.unlink()
        write_waiting_events(disk)
        assert [(event["kind"], event["step"]) for event in read_events(disk)] == [
            ("not_written", 10)
        ]
        assert not list(disk.rglob(".step*"))


def test_an_evaluation_can_be_left_after_any_batch(held_out, model, tmp_path):
    batches = []

    def leave():
        batches.append(1)
        if len(batches) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure_and_keep(
            model, held_out, batch_size=1, run_folder=tmp_path, step=3, after_batch=leave
        )
    assert len(batches) == 2 and saved_losses(tmp_path) == {}


NATS = np.array([4.0, 8.0]) * math.log(2)
LOSSES = DocumentLosses(
    np.array([7, 8], dtype=np.uint64), np.array([10, 30]), NATS, np.array([2, 4]), np.array([1, 2])
)


def test_figures_are_sums_over_documents():
    expected = {
        "loss": 2 * math.log(2),
        "perplexity": 4,
        "bits_per_byte": 12 / 40,
        "accuracy": 0.5,
        "tokens": 6,
    }
    assert LOSSES.metrics() == pytest.approx(expected)
    assert replace(LOSSES, nats=LOSSES.nats * 1e9).metrics()["perplexity"] == math.inf


def test_what_is_saved_is_loaded_whatever_the_sets_are_called(tmp_path):
    path = tmp_path / "held_out" / "step-5.npz"
    save_losses(path, {"a/b c": LOSSES})
    (tmp_path / "held_out" / "step-notes.npz").write_text("no step")
    assert saved_losses(tmp_path) == {5: path}
    loaded = vars(load_losses(path)["a/b c"])
    assert all((values == loaded[name]).all() for name, values in vars(LOSSES).items())
