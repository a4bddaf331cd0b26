import pytest
import torch
from publishing import contents, save
from safetensors.torch import save_file
from tiny import TINY_LLAMA
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from cpt.checkpoints.agreement import SaveFailed
from cpt.checkpoints.verify import count_stored, read_back, saved_parameters


def test_weights_that_are_placeholders_are_found_out(tmp_path):
    with pytest.raises(SaveFailed, match="weights are 20 numbers of 30") as failed:
        save(tmp_path, 3, 20, read_back=lambda folder: read_back(folder, nn.Linear(6, 5, bias=False)))
    assert failed.value.reason == "error" and not (tmp_path / "checkpoint-3").exists()


def test_a_disk_that_holds_something_else_is_found_out(tmp_path):
    def damaged(folder):
        path = folder / "optimizer.pt"
        path.write_bytes(path.read_bytes()[:-1] + b"x")
        read_back(folder, nn.Linear(1, 1))

    with pytest.raises(SaveFailed, match="optimizer.pt: hash") as failed:
        save(tmp_path, 1, 20, read_back=damaged)
    assert failed.value.reason == "storage"


def test_a_checkpoint_that_no_run_could_go_on_from_is_found_out(tmp_path, monkeypatch):
    whole = contents(1, 20)
    del whole.states["optimizer.pt"]
    monkeypatch.setattr("publishing.contents", lambda *_: whole)
    with pytest.raises(SaveFailed, match=r"no run could continue.*optimizer.pt") as failed:
        save(tmp_path, 1, 20, read_back=lambda folder: read_back(folder, nn.Linear(1, 1)))
    assert failed.value.reason == "error"


def test_shards_are_counted_together(tmp_path):
    for shard in (1, 2):
        save_file({f"w{shard}": torch.zeros(2, 3)}, tmp_path / f"model-{shard}.safetensors")
    assert count_stored(tmp_path) == 12


def test_a_tied_head_counts_once():
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**TINY_LLAMA, "tie_word_embeddings": True}))
    assert sum(numbers for _, numbers in saved_parameters(model)) == model.num_parameters()
