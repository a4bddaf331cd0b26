import pytest
import torch
from publishing import contents, save
from safetensors.torch import save_file
from tiny import TINY_LLAMA
from tiny_run import damage, save_checkpoint, seal
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from cpt.checkpoints.manifest import defects, lacking_state, refuse_changed_weights, verify_path
from cpt.checkpoints.snapshot import saved_parameters
from cpt.checkpoints.transaction import SaveFailed, count_stored, read_back
from cpt.errors import CheckpointError
from cpt.export.trained import find_trained

PLAIN = {"trainer_state.json", "scheduler.pt", "optimizer.pt", "rng_state.pth"}
ZERO = {
    "trainer_state.json",
    "scheduler.pt",
    "latest",
    "rng_state_0.pth",
    "rng_state_1.pth",
    "global_step3/zero_pp_rank_0_mp_rank_00_optim_states.pt",
    "global_step3/zero_pp_rank_1_mp_rank_00_optim_states.pt",
}


def test_what_a_run_needs_differs_between_plain_ddp_and_zero():
    assert lacking_state(PLAIN, 1) == [] and lacking_state(ZERO, 2) == []
    for name in PLAIN:
        assert lacking_state(PLAIN - {name}, 1) == [name]
    assert lacking_state(PLAIN, 2) == ["rng_state_0.pth", "rng_state_1.pth"]
    for name in ZERO:
        assert lacking_state(ZERO - {name}, 2), name


def test_weights_alone_are_sound_and_no_run_goes_on_from_them(tmp_path):
    weights = save_checkpoint(tmp_path, 3, sealed=False).rename(tmp_path / "weights-3")
    seal(weights, 3, kind="weights")
    assert verify_path(tmp_path)[0].found == []
    assert [found.what for found in defects(weights)] == ["weights alone"]


def test_all_that_a_run_has_published_is_verified_in_order(tmp_path):
    for step in (4, 12, 8):
        save_checkpoint(tmp_path, step)
    save_checkpoint(tmp_path, 16, sealed=False)
    damage(tmp_path / "checkpoint-12" / "optimizer.pt", "zeros")
    assert [(one.step, [found.what for found in one.found]) for one in verify_path(tmp_path)] == [
        (4, []),
        (8, []),
        (12, ["hash"]),
        (None, ["no sound manifest"]),
    ]


def test_a_finished_model_without_a_manifest_is_no_sound_one_and_what_was_put_aside_is_left_out(tmp_path):
    save_checkpoint(tmp_path, 4).rename(tmp_path / "bad-checkpoint-4")
    (tmp_path / "final").mkdir()
    assert [(one.folder.name, one.found[0].what) for one in verify_path(tmp_path)] == [("final", "no sound manifest")]


def test_no_model_is_made_of_changed_weights_and_the_optimizer_is_not_read_for_it(tmp_path):
    checkpoint = save_checkpoint(tmp_path, 4)
    damage(checkpoint / "optimizer.pt", "zeros")
    refuse_changed_weights(checkpoint)
    damage(checkpoint / "model.safetensors", "bit flip")
    with pytest.raises(CheckpointError, match="model.safetensors: hash"):
        find_trained(checkpoint)
    refuse_changed_weights(save_checkpoint(tmp_path, 8, sealed=False))


def test_where_nothing_can_be_verified_it_says_so(tmp_path):
    for path, said in ((tmp_path, "no checkpoint"), (tmp_path / "nowhere", "no such folder")):
        with pytest.raises(CheckpointError, match=said):
            verify_path(path)


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
