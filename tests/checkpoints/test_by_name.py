import copy

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from cpt.checkpoints.by_name import PlainKept, ZeroKept, load_kept, names_in, placed, stored_names
from cpt.errors import CheckpointError
from cpt.optim.adamw import adamw
from cpt.optim.one_kernel_adamw import OneKernelAdamW


def model(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).to(dtype)


def groups(layers):
    """As a recipe's: matrices and others, so that numbers are not in the order of names."""
    named = dict(layers.named_parameters())
    order = ["0.weight", "1.weight", "0.bias", "1.bias"]
    return order, [
        {"params": [named[name] for name in order[:2]]},
        {"params": [named[name] for name in order[2:]], "weight_decay": 0.0},
    ]


def steps(layers, optimizer, count):
    rows = torch.ones(5, 3, dtype=next(layers.parameters()).dtype)
    for _ in range(count):
        layers(rows).float().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in layers.parameters()]


def trained(folder, dtype=torch.float32):
    """A checkpoint of two steps, and what the run came to with two more."""
    layers = model(dtype)
    order, of_groups = groups(layers)
    optimizer = adamw(of_groups, 0.1)
    steps(layers, optimizer, 2)
    save_file(layers.state_dict(), folder / "model.safetensors")
    torch.save(copy.deepcopy(optimizer.state_dict()), folder / "optimizer.pt")
    return order, steps(layers, optimizer, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_plain_checkpoint_goes_on_by_names_bit_for_bit(tmp_path, dtype):
    order, straight = trained(tmp_path, dtype)
    torch.manual_seed(9)
    again = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).to(dtype)
    optimizer = adamw(groups(again)[1], 0.1)
    steps(again, optimizer, 1)  # what it has is replaced
    load_kept(again, optimizer, PlainKept(tmp_path, order))
    assert all(map(torch.equal, steps(again, optimizer, 2), straight))


def test_a_master_copy_is_the_weight(tmp_path):
    order, _ = trained(tmp_path, torch.bfloat16)
    kept = PlainKept(tmp_path, order)
    assert kept.weight("0.weight").dtype == torch.float32 and "master" not in kept.state("0.weight")
    again = model()  # fp32 weights need none
    optimizer = OneKernelAdamW(groups(again)[1], lr=0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    load_kept(again, optimizer, kept)
    assert torch.equal(again[0].weight, kept.weight("0.weight")) and "master" not in optimizer.state[again[0].weight]


@pytest.mark.parametrize("rounding", [None, "kahan", "stochastic"])
def test_states_are_those_of_the_optimizer_that_goes_on_so_that_it_can_resume(tmp_path, rounding):
    order, _ = trained(tmp_path, torch.bfloat16)
    again = model(torch.bfloat16)
    optimizer = adamw(groups(again)[1], 0.1, rounding=rounding)
    load_kept(again, optimizer, PlainKept(tmp_path, order))
    steps(again, optimizer, 1)
    adamw(groups(model(torch.bfloat16))[1], 0.1, rounding=rounding).load_state_dict(
        copy.deepcopy(optimizer.state_dict())
    )


def test_another_model_is_refused(tmp_path):
    order, _ = trained(tmp_path)
    with pytest.raises(CheckpointError, match="states of 4 parameters, and this run trains 3"):
        PlainKept(tmp_path, order[:3])
    with pytest.raises(CheckpointError, match="of another model: 2 trained parameters"):
        load_kept(model()[:1], adamw([{"params": []}], 0.1), PlainKept(tmp_path, order))


def test_a_tied_weight_is_found_under_any_of_its_names(tmp_path):
    tied = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    tied[1].weight = tied[0].weight

    class Other:
        def names(self):
            return {"1.weight"}

    assert names_in(Other(), tied) == {"0.weight": "1.weight"}


def test_weights_that_are_saved_under_other_names_are_told(tmp_path):
    order, _ = trained(tmp_path)
    save_file({"fused": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="no weights called 0.weight: .* shares the model as before"):
        PlainKept(tmp_path, order).weight("0.weight")


def test_names_of_adapters_are_those_of_peft():
    assert "a.lora_A.weight" in stored_names("a.lora_A.default.weight")
    assert "embed.weight" in stored_names("embed.modules_to_save.default.weight")


def test_counters_lie_where_the_optimizer_reads_them():
    parameter, counter = nn.Parameter(torch.zeros(2)), torch.tensor(3.0)
    optimizer = torch.optim.AdamW([parameter])
    assert placed(counter, parameter, {"fused": False}, optimizer) is not counter
    assert placed(7, parameter, {}, optimizer) == 7
    assert placed(torch.ones(2, dtype=torch.float64), parameter, {}, optimizer).dtype == torch.float32


@pytest.mark.parametrize("stage3", [False, True])
def test_zeros_converted_files_are_read(tmp_path, stage3):
    (tmp_path / "latest_universal").write_text("global_step2_universal")
    folder = tmp_path / "global_step2_universal" / "zero" / "w"
    folder.mkdir(parents=True)
    for key in ("fp32", "exp_avg", "exp_avg_sq"):
        value = torch.ones(4)
        torch.save(value if stage3 else {"param": value}, folder / f"{key}.pt")
    if stage3:
        torch.save(
            {"optimizer_state_dict": {"state": {0: {"step": torch.tensor(2.0)}}}}, folder.parent / "optimizer_state.pt"
        )
    else:
        torch.save(torch.tensor(2.0), folder / "step.pt")
    kept = ZeroKept(tmp_path)
    assert kept.names() == {"w"} and kept.weight("w").tolist() == [1] * 4
    assert kept.state("w").keys() == {"step", "exp_avg", "exp_avg_sq"} and kept.state("w")["step"] == 2
