"""What a run loads of a checkpoint of FSDP2, and of one that DeepSpeed converted."""

from types import SimpleNamespace

import pytest
import torch
from one_process_group import alone_in_a_group
from safetensors.torch import save_file
from tiny_run import save_checkpoint
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import LambdaLR

from cpt.checkpoints.load import (
    is_universal,
    load_shards,
    refuse_other_engine,
    separate_groups,
    written_for,
)
from cpt.checkpoints.manifest import file_of_part
from cpt.checkpoints.sharding import full_weights, part_here
from cpt.errors import CheckpointError


class Counting(nn.Linear):
    """A layer of FSDP2 with saved buffers and another."""

    def __init__(self, value):
        super().__init__(3, 5)
        nn.init.constant_(self.weight, value)
        nn.init.constant_(self.bias, value)
        for name, is_saved in (("seen", True), ("added_later", True), ("scratch", False)):
            self.register_buffer(name, torch.full((3,), value), persistent=is_saved)


def training(value):
    """A sharded layer, its optimizer and its schedule."""
    layer = Counting(value)
    fully_shard(layer)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=value)
    return layer, optimizer, LambdaLR(optimizer, lambda step: 1 / (1 + step))


def step(layer, optimizer, schedule):
    layer(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()


def everything(layer, optimizer, schedule):
    states = [value for state in optimizer.state.values() for value in state.values()]
    weights = {**full_weights(layer, only_trained=False), "scratch": layer.scratch}
    weights |= {str(number): value for number, value in enumerate(states)}
    whole = {
        name: getattr(value, "full_tensor", lambda value=value: value)().tolist()
        for name, value in weights.items()
    }
    return {**whole, "schedule": schedule.state_dict()["last_epoch"]}


@pytest.mark.parametrize("has_model", [True, False])
def test_a_sharded_run_continues_with_weights_states_schedule_and_saved_buffers(
    tmp_path, has_model
):
    with alone_in_a_group():
        saved = training(2.0)
        for _ in range(3):
            step(*saved)
        (tmp_path / "fsdp").mkdir()
        torch.save(part_here(*saved[:2]), tmp_path / file_of_part(0, 1))
        torch.save(saved[2].state_dict(), tmp_path / "scheduler.pt")
        stored = {
            name: value
            for name, value in full_weights(saved[0], only_trained=False).items()
            if name != "added_later"
        }
        # safetensors' weights are not read: the parts have them
        stored |= {"weight": torch.zeros(5, 3), "scratch": torch.zeros(3)}
        if has_model:
            save_file(stored, tmp_path / "model.safetensors")
        again = training(7.0)
        load_shards(tmp_path, *again, trust=False)
        expected = everything(*saved) | {"added_later": [7.0] * 3, "scratch": [7.0] * 3}
        if not has_model:
            expected["seen"] = [7.0] * 3
        assert everything(*again) == expected


class Foreign:
    """An object that only a trusted pickle may contain."""

    def __init__(self, last_epoch):
        self.last_epoch = last_epoch


@pytest.mark.parametrize("pickled", ["scheduler.pt", "part"])
def test_pickles_of_a_sharded_run_are_read_as_data_unless_trusted(tmp_path, pickled):
    layer = nn.Linear(3, 5)
    optimizer = torch.optim.AdamW(layer.parameters())
    schedule = LambdaLR(optimizer, lambda step: 1.0)
    (tmp_path / "fsdp").mkdir()
    more = {"other": Foreign(5)}
    contents = {
        "scheduler.pt": schedule.state_dict() | {"last_epoch": 5},
        "part": part_here(layer, optimizer),
    }
    contents[pickled] = contents[pickled] | more
    torch.save(contents["scheduler.pt"], tmp_path / "scheduler.pt")
    torch.save(contents["part"], tmp_path / file_of_part(0, 1))
    with pytest.raises(CheckpointError):
        load_shards(tmp_path, layer, optimizer, schedule, trust=False)
    load_shards(tmp_path, layer, optimizer, schedule, trust=True)
    assert schedule.last_epoch == 5


def test_groups_of_a_converted_checkpoint_have_their_own_options_and_step_counters(tmp_path):
    assert not is_universal(tmp_path)
    (tmp_path / "latest_universal").write_text("global_step4_universal\n")
    assert is_universal(tmp_path)
    folder = tmp_path / "global_step4_universal" / "zero"
    folder.mkdir(parents=True)
    options = [{"lr": 0.5 / number, "weight_decay": number} for number in (1, 3, 5)]
    saved = [{**one, "params": [number]} for number, one in enumerate(options)]
    torch.save({"param_groups": saved, "state": {}}, folder / "optimizer_state.pt")
    weights = [nn.Parameter(torch.ones(number)) for number in (1, 3, 5)]
    shared = torch.tensor(4.0)
    first = {"lr": 0.5, "weight_decay": 1}
    optimizer = SimpleNamespace(
        param_groups=[{"params": [weight], **first} for weight in weights],
        state={
            weights[0]: {"step": shared, "exp_avg": weights[0]},
            weights[1]: {"step": shared},
            weights[2]: {"step": 4},
        },
    )
    separate_groups(optimizer, tmp_path)
    expected = [{"params": [weight], **one} for weight, one in zip(weights, options, strict=True)]
    assert optimizer.param_groups == expected
    optimizer.state[weights[0]]["step"] += 1
    assert [float(state["step"]) for state in optimizer.state.values()] == [5, 4, 4]
    optimizer.param_groups.pop()
    with pytest.raises(ValueError, match="zip"):
        separate_groups(optimizer, tmp_path)


def test_the_number_of_processes_that_wrote_is_known_from_the_manifest_alone(tmp_path):
    assert written_for(save_checkpoint(tmp_path, 4, world_size=3)) == 3
    assert written_for(save_checkpoint(tmp_path, 5, sealed=False)) is None


@pytest.mark.parametrize(
    ("stage", "sharding", "fits"),
    [
        (None, "plain", True),
        (None, "fsdp", False),
        (None, "zero-2", False),
        (2, "zero-2", True),
        (2, "zero-3", False),
        (2, "plain", False),
    ],
)
def test_optimizer_states_of_another_engine_are_not_converted(tmp_path, stage, sharding, fits):
    checkpoint = save_checkpoint(tmp_path, 4, zero_stage=stage)
    if fits:
        refuse_other_engine(checkpoint, sharding)
        return
    with pytest.raises(CheckpointError, match="was written with .* --new model.path=FOLDER"):
        refuse_other_engine(checkpoint, sharding)


def test_deepspeeds_parts_without_a_manifest_may_be_of_any_stage(tmp_path):
    checkpoint = save_checkpoint(tmp_path, 4, sealed=False)
    (checkpoint / "latest").write_text("global_step4")
    for sharding in ("zero-1", "zero-3"):
        refuse_other_engine(checkpoint, sharding)
    with pytest.raises(CheckpointError, match="DeepSpeed ZeRO, and this run uses FSDP2"):
        refuse_other_engine(checkpoint, "fsdp")
