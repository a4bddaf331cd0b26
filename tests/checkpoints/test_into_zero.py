"""Against a stand-in for DeepSpeed's engine: `tests/end_to_end/test_splitting.py` fills real ones."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from cpt.checkpoints.into_zero import load_into_zero, written_by_host_kernel
from cpt.errors import CheckpointError


class Kept:
    """Weights of sevens, moments of ones and twos."""

    def __init__(self, model, **steps):
        self.shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        self.steps = steps

    def names(self):
        return set(self.shapes)

    def weight(self, name):
        return torch.arange(self.shapes[name].numel(), dtype=torch.float32)

    def state(self, name):
        full = torch.ones(self.shapes[name])
        return {"step": torch.tensor(self.steps.get(name, 3.0)), "exp_avg": full, "exp_avg_sq": 2 * full}


def engine_of_stage2(model, of_part, of_whole):
    """The second half of a parameter's numbers is this process's."""
    flat = torch.zeros(8)
    mapping = SimpleNamespace(lp_fragment_address=of_whole, hp_fragment_address=of_part, param_group_index=0)
    vars(model.weight)["_hp_mapping"] = mapping
    zero = SimpleNamespace(single_partition_of_fp32_groups=[flat])
    return SimpleNamespace(module=model, optimizer=zero, zero_optimization_stage=lambda: 2), flat


def address(start, numel):
    return SimpleNamespace(start=start, numel=numel)


def test_a_process_gets_the_stretch_that_it_updates_and_the_model_whole():
    model = nn.Linear(3, 4, bias=False)
    engine, flat = engine_of_stage2(model, address(2, 6), address(6, 6))
    kernel = torch.optim.AdamW([flat])
    assert load_into_zero(engine, kernel, Kept(model)) == 3
    assert model.weight.flatten().tolist() == list(range(12))
    assert flat.tolist() == [0, 0, 6, 7, 8, 9, 10, 11]
    state = kernel.state[flat]
    assert state["step"] == 3 and state["exp_avg"].tolist() == [0, 0] + [1] * 6 and state["exp_avg_sq"][-1] == 2


def test_parameters_that_were_updated_in_some_steps_only_are_refused():
    model = nn.Linear(3, 4)
    engine, flat = engine_of_stage2(model, address(0, 1), address(0, 1))
    with pytest.raises(CheckpointError, match="updated in some steps only. Go on the way it was written"):
        load_into_zero(engine, torch.optim.AdamW([flat]), Kept(model, bias=1.0))


@pytest.mark.parametrize("stage", ["base_optimizer_state", "optimizer_state_dict"])
@pytest.mark.parametrize(("group", "on_host"), [({"lr": 1.0}, False), ({"lr": 1.0, "bias_correction": True}, True)])
def test_the_groups_tell_which_adamw_made_the_parts(tmp_path, stage, group, on_host):
    (tmp_path / "global_step4").mkdir()
    part = tmp_path / "global_step4" / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    torch.save({"optimizer_state_dict": {stage: {"state": {}, "param_groups": [group]}}}, part)
    assert written_by_host_kernel(tmp_path) is on_host


def test_where_no_groups_are_kept_nothing_tells(tmp_path):
    assert written_by_host_kernel(tmp_path) is None
    (tmp_path / "global_step4").mkdir()
    torch.save(
        {"optimizer_state_dict": {"base_optimizer_state": [{}]}}, tmp_path / "global_step4" / "a_optim_states.pt"
    )
    assert written_by_host_kernel(tmp_path) is None
