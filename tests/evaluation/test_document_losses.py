import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from full_disk import disk_of_its_own, fill
from tiny import TINY_LLAMA
from transformers import LlamaConfig, LlamaForCausalLM
from xxhash import xxh3_64_intdigest

from cpt.errors import CheckpointError, DataError
from cpt.evaluation.document_losses import document_losses, measure_and_keep
from cpt.evaluation.judged_sets import Judges, judges_of_texts, open_judged_sets
from cpt.evaluation.kept_losses import kept_losses, load_losses, save_losses
from cpt.evaluation.perplexity import evaluate_held_out
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
    judges = judges_of_texts([f"held={corpus / 'held_out.jsonl'}"], sequence_length)
    opened = open_judged_sets(Judges(judges.data, judges.evaluation, packing=packing), tokenizer)
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


@pytest.mark.parametrize(("packing", "batch_size"), [("best_fit", 1), ("best_fit", 5), ("none", 3)])
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
    assert found.bits_per_byte == pytest.approx(expected[:, 0].sum() / np.log(2) / found.num_bytes.sum(), rel=1e-6)


def test_rows_of_a_token_budget_give_the_same(corpus, tokenizer, model):
    packed, padded = (
        document_losses(model, sets(corpus, tokenizer, packing), batch_size=2)["held"]
        for packing in ("none", "token_budget")
    )
    assert (
        padded.nats == pytest.approx(packed.nats, rel=1e-5)
        and padded.num_tokens.tolist() == packed.num_tokens.tolist()
    )


def test_the_sums_are_those_of_the_whole_set(corpus, tokenizer, model):
    held_out = sets(corpus, tokenizer)
    figures = evaluate_held_out(model, held_out, batch_size=4)
    found = document_losses(model, held_out, batch_size=4)["held"].figures()
    assert {f"held_{name}": pytest.approx(value, rel=1e-9) for name, value in found.items()} == figures


def test_no_token_is_lost_where_rows_are_short(corpus, tokenizer, model):
    long, short = (
        document_losses(model, sets(corpus, tokenizer, "best_fit", length), batch_size=4)["held"]
        for length in (128, 16)
    )
    assert long.num_tokens.tolist() == short.num_tokens.tolist()


def test_a_run_keeps_what_each_evaluation_found(corpus, tokenizer, model, tmp_path):
    held_out = sets(corpus, tokenizer)
    for step in (0, 5, 10):
        figures = measure_and_keep(model, held_out, batch_size=4, run_folder=tmp_path, step=step)
    assert figures == pytest.approx(evaluate_held_out(model, held_out, batch_size=4))
    assert list(kept_losses(tmp_path)) == [0, 10]
    kept = load_losses(kept_losses(tmp_path)[0])["held"]
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
        assert figures == pytest.approx(evaluate_held_out(model, held_out, batch_size=4))
        assert list(kept_losses(disk)) == [0] and load_losses(kept_losses(disk)[0])
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
    assert len(batches) == 2 and kept_losses(tmp_path) == {} and not model.training


def test_a_damaged_file_is_told(corpus, tokenizer, model, tmp_path):
    save_losses(tmp_path / "x.npz", document_losses(model, sets(corpus, tokenizer), batch_size=4))
    whole = (tmp_path / "x.npz").read_bytes()
    (tmp_path / "x.npz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match="x.npz is damaged"):
        load_losses(tmp_path / "x.npz")


@pytest.mark.long
def test_two_processes_give_the_same_losses(corpus, tokenizer, model, tokenizer_folder, tmp_path):
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    found = {}
    command = [
        sys.executable,
        "-m",
        "cpt.cli",
        "evaluate",
        str(tmp_path),
        "--text",
        f"held={corpus / 'held_out.jsonl'}",
    ]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    for name, before in {"one": [sys.executable], "two": launcher}.items():
        options = ["--sequence-length", "64", "--json"]
        answer = subprocess.run(
            [*before, *command[1:], *options], capture_output=True, text=True, timeout=300, env=environment
        )
        assert answer.returncode == 0, answer.stderr[-3000:]
        found[name] = json.loads(answer.stdout)["sets"][0]
    expected = document_losses(model, sets(corpus, tokenizer), batch_size=4)["held"]
    for figures in found.values():
        assert figures["bits_per_byte"] == pytest.approx(expected.bits_per_byte, rel=1e-6)
    assert found["one"]["tokens"] == found["two"]["tokens"]


def test_an_empty_set_is_a_data_error(tmp_path, tokenizer):
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(DataError, match="empty"):
        open_judged_sets(judges_of_texts([f"e={tmp_path / 'empty.txt'}"], 8), tokenizer)
