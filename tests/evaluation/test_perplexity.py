import json
import math
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from cpt.data.held_out import HeldOutSet
from cpt.errors import DataError
from cpt.evaluation import perplexity
from cpt.evaluation.perplexity import evaluate_held_out, evaluation_mode

SEQUENCE_LENGTH, VOCABULARY = 16, 40


def tiny_model(dropout=0.0):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_dropout=dropout,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=2,
    )
    return LlamaForCausalLM(config)


def documents(lengths=(5, 9, 16, 2, 11, 7, 3, 13, 6, 4, 10)):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, VOCABULARY, (length,), generator=generator) for length in lengths]


def held_out_set(name="general"):
    """Documents one after the other; a row ends where the next one has no room, and is filled with padding."""
    packed, room = [[]], SEQUENCE_LENGTH
    for document in documents():
        if len(document) > room:
            packed, room = [*packed, []], SEQUENCE_LENGTH
        packed[-1].append(document)
        room -= len(document)
    return HeldOutSet(
        name=name, rows=[row_of(pieces) for pieces in packed], num_documents=11, num_tokens=86, num_bytes=300
    )


def row_of(pieces):
    padding = torch.zeros(SEQUENCE_LENGTH - sum(map(len, pieces)), dtype=torch.long)
    labels = [torch.cat([torch.tensor([-100]), piece[1:]]) for piece in pieces]
    return {
        "input_ids": torch.cat([*pieces, padding]),
        "labels": torch.cat([*labels, torch.full_like(padding, -100)]),
        "position_ids": torch.cat([torch.arange(len(piece)) for piece in [*pieces, padding]]),
    }


def nll_by_hand(model):
    """One document at a time, without packing: (sum of nats, predicted tokens)."""
    total, count = 0.0, 0
    for document in documents():
        with torch.no_grad():
            logits = model(input_ids=document[None], use_cache=False).logits[0]
        total += F.cross_entropy(logits[:-1].double(), document[1:], reduction="sum").item()
        count += len(document) - 1
    return total, count


def padded_row(some):
    longest = max(map(len, some))
    rows = [{"input_ids": document, "labels": torch.cat([torch.tensor([-100]), document[1:]])} for document in some]
    padded = {
        name: torch.stack([F.pad(row[name], (0, longest - len(row[name])), value=fill) for row in rows])
        for name, fill in (("input_ids", 0), ("labels", -100))
    }
    mask = torch.stack([(torch.arange(longest) < len(document)).long() for document in some])
    return {**padded, "position_ids": torch.arange(longest).repeat(len(some), 1), "attention_mask": mask}


@pytest.mark.parametrize("batch_size", [1, 4])
def test_rows_that_are_batches_give_the_same_figures(batch_size):
    model, falling = tiny_model(), sorted(documents(), key=len, reverse=True)
    total, count = nll_by_hand(model.eval())
    rows = [padded_row(falling[first : first + 3]) for first in range(0, 11, 3)]
    figures = evaluate_held_out(model, {"general": HeldOutSet("general", rows, 11, 86, 300)}, batch_size=batch_size)
    assert figures["general_tokens"] == count and figures["general_loss"] == pytest.approx(total / count, rel=1e-5)


@pytest.mark.parametrize("batch_size", [1, 2, 3, 100])
def test_the_figures_equal_a_loop_over_documents_at_any_batch_size(batch_size):
    model = tiny_model()
    total, count = nll_by_hand(model.eval())
    figures = evaluate_held_out(model, {"general": held_out_set()}, batch_size=batch_size)
    assert figures["general_tokens"] == count
    assert figures["general_loss"] == pytest.approx(total / count, rel=1e-6)
    assert figures["general_perplexity"] == pytest.approx(math.exp(total / count), rel=1e-5)
    assert figures["general_bits_per_byte"] == pytest.approx(total / math.log(2) / 300, rel=1e-6)


def test_logits_in_chunks_give_the_same_figures(monkeypatch):
    model, sets = tiny_model(), {"general": held_out_set()}
    whole = evaluate_held_out(model, sets, batch_size=2)
    monkeypatch.setattr(perplexity, "POSITIONS_AT_ONCE", 4)
    assert evaluate_held_out(model, sets, batch_size=2) == pytest.approx(whole, rel=1e-9)


def test_each_set_has_its_own_figures():
    figures = evaluate_held_out(tiny_model(), {"domain": held_out_set(), "general": held_out_set()}, batch_size=4)
    assert len(figures) == 10
    assert figures["domain_loss"] == figures["general_loss"]


def test_a_uniform_model_needs_log2_of_the_vocabulary_for_each_token():
    model = tiny_model()
    nn.init.zeros_(model.lm_head.weight)
    figures = evaluate_held_out(model, {"general": held_out_set()}, batch_size=4)
    assert figures["general_perplexity"] == pytest.approx(VOCABULARY, rel=1e-5)
    assert figures["general_bits_per_byte"] == pytest.approx(
        figures["general_tokens"] * math.log2(VOCABULARY) / 300, rel=1e-6
    )


def test_a_lost_model_is_reported_and_does_not_raise():
    model = tiny_model()
    with torch.no_grad():
        model.lm_head.weight.mul_(1e6)
    assert evaluate_held_out(model, {"general": held_out_set()}, batch_size=4)["general_perplexity"] == math.inf


def test_training_goes_on_as_if_there_had_been_no_evaluation():
    model = tiny_model(dropout=0.5).train()
    random_state = torch.get_rng_state()
    first = evaluate_held_out(model, {"general": held_out_set()}, batch_size=2)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(module.training for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert evaluate_held_out(model, {"general": held_out_set()}, batch_size=2) == first  # no dropout inside


def test_a_peft_model_is_measured_with_its_adapter():
    model, sets = tiny_model(), {"general": held_out_set()}
    plain = evaluate_held_out(model, sets, batch_size=4)["general_loss"]
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    assert evaluate_held_out(adapted, sets, batch_size=4)["general_loss"] != pytest.approx(plain, rel=1e-3)


@pytest.mark.long
def test_two_processes_give_the_figures_of_one():
    """Under DDP and by itself; with 7 rows and batches of 2, one process runs out of rows before the other."""
    expected = evaluate_held_out(tiny_model(), {"general": held_out_set()}, batch_size=2)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", __file__]
    answer = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert answer.returncode == 0, answer.stderr[-3000:]
    results = [json.loads(line) for line in answer.stdout.splitlines()]
    assert len(results) == 4
    for figures in results:
        assert figures == pytest.approx(expected, rel=1e-6)


def report_as_one_of_two_processes():
    torch.distributed.init_process_group("gloo")
    wrapped = nn.parallel.DistributedDataParallel(tiny_model())
    for model in (tiny_model(), wrapped):
        figures = evaluate_held_out(model, {"general": held_out_set()}, batch_size=2)
        print(json.dumps(figures) + "\n", end="", flush=True)
    torch.distributed.barrier()
    os._exit(0)  # torch 2.13 can hang in ~ProcessGroupGloo, waiting for a thread that waits for Python's lock


if __name__ == "__main__":
    report_as_one_of_two_processes()


def test_each_module_gets_its_own_mode_back_even_after_an_error():
    model = nn.Sequential(nn.Dropout(), nn.Sequential(nn.Dropout()))
    model.train()
    model[1].eval()  # a frozen part
    before = [module.training for module in model.modules()]
    try:
        with evaluation_mode(model):
            assert not any(module.training for module in model.modules())
            assert not torch.is_grad_enabled()
            raise KeyError
    except KeyError:
        pass
    assert [module.training for module in model.modules()] == before == [True, True, False, False]
    assert torch.is_grad_enabled()


def test_a_set_with_nothing_to_predict_is_a_data_error():
    rows = [{key: torch.full((4,), -100 if key == "labels" else 0) for key in ("input_ids", "labels", "position_ids")}]
    with pytest.raises(DataError, match="`a` has no document of two tokens"):
        evaluate_held_out(tiny_model(), {"a": HeldOutSet("a", rows, 1, 1, 1)}, batch_size=1)
