import os
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from tiny import write_recipe
from tiny_run import save_checkpoint

from cpt.checkpoints.manifest import read_manifest, write_manifest
from cpt.checkpoints.resume import ResumePoint
from cpt.data.rows.build import build_data
from cpt.errors import CheckpointError
from cpt.models.build import build_model
from cpt.recipe.load import load_recipe
from cpt.runs.events import read_events
from cpt.stages.build import build_trainer
from cpt.tokenizer.load import load_tokenizer
from cpt.training.resuming import (
    CheckpointLoader,
    exactness,
    keep_global_batch,
    separate_groups,
    train_from,
    warn_elastic,
    written_for,
)


@pytest.fixture
def point(tmp_path):
    """At step 4 of a run of one process."""
    checkpoint = save_checkpoint(tmp_path, 4)
    return ResumePoint(checkpoint, read_manifest(checkpoint))


def test_the_same_processes_go_on_bit_for_bit(point):
    assert exactness(ResumePoint(), deterministic=True) == exactness(point, deterministic=True) == "bit-exact"
    assert written_for(point.checkpoint) == 1


def test_a_weaker_class_says_why(point, monkeypatch):
    assert exactness(point, deterministic=False).startswith("rounding: GPU")
    assert exactness(ResumePoint(point.checkpoint), deterministic=True).startswith("unproven: ")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert exactness(point, deterministic=True).startswith("elastic: from step 4 with 2 processes instead of 1")


def test_what_a_run_has_lost_it_does_not_get_back(point):
    lost = ResumePoint(point.checkpoint, replace(point.manifest, exactness="elastic: ..."))
    assert exactness(lost, deterministic=True) == "elastic: ..."


def test_another_number_of_processes_keeps_the_rows_of_a_step(tiny_recipe, tmp_path, point, monkeypatch):
    stated = load_recipe(write_recipe(tiny_recipe, tmp_path / "stated.yaml"))
    del tiny_recipe["budget"]["global_batch_tokens"]
    tiny_recipe["training"]["gradient_accumulation_steps"] = 2
    open_ = load_recipe(write_recipe(tiny_recipe, tmp_path / "open.yaml"))
    assert keep_global_batch(open_, point) == open_ and keep_global_batch(open_, ResumePoint()) == open_
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert (
        keep_global_batch(open_, point).budget.global_batch_tokens == 256
        and keep_global_batch(stated, point) == stated
    )
    tiny_recipe["training"]["parallelism_config"] = {"sp_size": 2}
    shared = load_recipe(write_recipe(tiny_recipe, tmp_path / "shared.yaml"))
    assert keep_global_batch(shared, point) == shared, "two processes that share rows read as one"


def test_each_group_has_its_own_options_and_step_again(tmp_path):
    weights = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    groups = [{"params": [weights[0]], "weight_decay": 0.1}, {"params": [weights[1]], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups)
    (tmp_path / "latest_universal").write_text("global_step4_universal")
    zero = tmp_path / "global_step4_universal" / "zero"
    zero.mkdir(parents=True)
    torch.save(
        {"param_groups": [{"params": [0], "weight_decay": 0.1}, {"params": [1], "weight_decay": 0.0}]},
        zero / "optimizer_state.pt",
    )
    shared = torch.tensor(4.0)
    for weight in weights:
        optimizer.state[weight]["step"] = shared
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.1
    separate_groups(optimizer, tmp_path)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    first, second = (optimizer.state[weight]["step"] for weight in weights)
    assert first is not second and first == second == 4.0 and optimizer.param_groups[1]["params"][0] is weights[1]


@pytest.fixture
def trainer(tiny_recipe, tmp_path):
    """A trainer of a tiny model, and the data that it reads."""
    recipe = load_recipe(write_recipe(tiny_recipe, tmp_path / "r.yaml"))
    tokenizer = load_tokenizer(recipe.tokenizer, recipe.model)
    data = build_data(recipe.data, tokenizer, seed=recipe.seed, cache_dir=tmp_path / "cache")
    trainer = build_trainer(recipe, build_model(recipe.model, tokenizer), tokenizer, data)
    trainer.data_for_test = data
    return trainer


def test_micro_batches_that_had_to_shrink_cost_the_last_bit(trainer):
    assert trainer.checkpoint_loader.exactness == "bit-exact"
    trainer.args.per_device_train_batch_size = 1
    assert trainer.checkpoint_loader.exactness.startswith("rounding: 1 rows at a time instead of 2")


def test_random_numbers_of_other_processes_are_replaced_the_same_way_each_time(trainer, tmp_path):
    other = save_checkpoint(tmp_path / "other", 4, world_size=2)
    draws = []
    for step in (4, 4, 5):
        torch.rand(3)
        trainer.state.global_step = step
        trainer.load_random_states(str(other))
        draws.append(torch.rand(3))
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])


class Planted:
    """Unpickling it makes a folder."""

    def __init__(self, mark):
        self.mark = str(mark)

    def __reduce__(self):
        return os.mkdir, (self.mark,)


def test_what_is_planted_in_a_plain_checkpoint_never_runs(trainer, tmp_path):
    theirs = save_checkpoint(tmp_path / "theirs", 4, sealed=False)
    (theirs / "model.safetensors").unlink()
    for name, load in {
        "pytorch_model.bin": trainer._load_from_checkpoint,
        "rng_state.pth": trainer.load_random_states,
        "optimizer.pt": lambda folder: trainer._prepare_for_training(8, trainer.get_train_dataloader(), folder),
    }.items():
        torch.save({"passenger": Planted(tmp_path / "ran")}, theirs / name)
        with pytest.raises(CheckpointError, match="reading it would call posix.mkdir"):
            load(str(theirs))
    assert not (tmp_path / "ran").exists()


def test_a_checkpoint_of_another_engine_is_refused_with_the_command_that_starts_from_its_weights(trainer, point):
    checkpoint = point.checkpoint
    (checkpoint / "manifest.json").unlink()
    write_manifest(checkpoint, replace(point.manifest, zero_stage=2))
    with pytest.raises(CheckpointError, match=f"ZeRO-2.*no sharding.*cpt export {checkpoint} .*--new model.path="):
        train_from(trainer, trainer.data_for_test, replace(point, manifest=read_manifest(checkpoint)))


@pytest.mark.parametrize("on_host", [True, False])
def test_zeros_states_do_not_move_to_the_host_or_back(tmp_path, on_host):
    engine = SimpleNamespace(sharding="zero-2", offloads_optimizer=False)
    loader = CheckpointLoader(SimpleNamespace(engine=engine))
    (tmp_path / "latest").write_text("global_step4")
    (tmp_path / "global_step4").mkdir()
    group = {"lr": 1.0, "bias_correction": True} if on_host else {"lr": 1.0}
    states = {"optimizer_state_dict": {"optimizer_state_dict": {"state": {}, "param_groups": [group]}}}
    torch.save(states, tmp_path / "global_step4" / "x_optim_states.pt")
    with pytest.raises(CheckpointError, match="host memory") if on_host else nullcontext():
        loader.refuse_other_engine(tmp_path)


def test_another_number_of_processes_is_recorded(point, tmp_path):
    warn_elastic(tmp_path, replace(point.manifest, world_size=2))
    (event,) = read_events(tmp_path)
    assert event["kind"] == "elastic" and (event["processes"], event["processes_before"]) == (1, 2)
