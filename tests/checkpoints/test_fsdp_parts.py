from pathlib import Path

import pytest
import torch
from one_process_group import alone_in_a_group
from tiny_models import make_tokenizer, tiny_config
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from cpt.checkpoints.manifest import file_of_part
from cpt.checkpoints.sharding import full_weights, load_parts, part_here, read_parts, whole
from cpt.errors import CheckpointError
from cpt.models.build import build_model
from cpt.optim.build import build_optimizer
from cpt.recipe.schema import Model, Optimizer


def sharded(seed):
    """A tiny model in FSDP2's parts, and its optimizer after two steps."""
    model = build_model(Model(from_scratch=True, config=tiny_config("llama")), make_tokenizer(), seed=seed)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = build_optimizer(Optimizer(learning_rate=1e-2), model)
    return model, optimizer


def steps(model, optimizer, count):
    ids = torch.randint(4, 90, (2, 16), generator=torch.Generator().manual_seed(0))
    losses = []
    for _ in range(count):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.fixture(autouse=True)
def group():
    with alone_in_a_group():
        yield


def test_a_model_in_parts_goes_on_from_what_it_wrote_bit_for_bit(tmp_path):
    model, optimizer = sharded(seed=1)
    steps(model, optimizer, 2)
    path = tmp_path / file_of_part(0, 1)
    path.parent.mkdir()
    torch.save(part_here(model, optimizer), path)
    straight = steps(model, optimizer, 2)
    again, of_again = sharded(seed=2)
    load_parts(tmp_path, again, of_again)
    assert all(isinstance(state["exp_avg"], DTensor) for state in of_again.state.values())
    assert steps(again, of_again, 2) == straight


def test_parts_are_put_together_for_the_models_file():
    model, _ = sharded(seed=1)
    plain = build_model(Model(from_scratch=True, config=tiny_config("llama")), make_tokenizer(), seed=1)
    found = full_weights(model, only_trained=False)
    expected = plain.state_dict()
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def parts_of_two(folder: Path, rows: torch.Tensor):
    """A checkpoint of two processes, of one parameter of three rows."""
    (folder / "fsdp").mkdir(parents=True)
    for rank, mine in enumerate((rows[:2], rows[2:])):
        shape = list(rows.shape)
        state = {"step": torch.tensor(3.0), "exp_avg": {"shape": shape, "rows": mine * 2}}
        part = {"format": 1, "weights": {"w": {"shape": shape, "rows": mine}}, "states": {"w": state}}
        torch.save(part, folder / file_of_part(rank, 2))


def test_rows_of_several_processes_are_one_tensor(tmp_path):
    rows = torch.arange(12.0).view(3, 4)
    parts_of_two(tmp_path, rows)
    model = torch.nn.ParameterDict({"w": torch.zeros(3, 4)})
    optimizer = torch.optim.AdamW(model.parameters())
    load_parts(tmp_path, model, optimizer)
    state = optimizer.state[model["w"]]
    assert torch.equal(model["w"], rows) and torch.equal(state["exp_avg"], 2 * rows) and state["step"] == 3
    with pytest.raises(CheckpointError, match="another model"):
        load_parts(tmp_path, torch.nn.ParameterDict({"v": torch.zeros(3, 4)}), optimizer)


def test_a_missing_part_is_told(tmp_path):
    parts_of_two(tmp_path, torch.zeros(3, 4))
    (tmp_path / file_of_part(1, 2)).unlink()
    with pytest.raises(CheckpointError, match="lacks parts in fsdp/"):
        read_parts(tmp_path, trust=False)


def test_the_last_process_may_have_no_rows():
    parts = [{"shape": [1, 2], "rows": torch.ones(1, 2)}, {"shape": [1, 2], "rows": torch.ones(0, 2)}]
    assert whole(parts).tolist() == [[1, 1]]
