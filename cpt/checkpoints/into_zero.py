"""Fill DeepSpeed's ZeRO engine with weights and Adam's states that another way of training has kept by name."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from cpt.checkpoints.by_name import OF_ADAM, Kept, names_in
from cpt.checkpoints.safe_load import load_data
from cpt.errors import CheckpointError


@torch.no_grad()
def load_into_zero(engine: Any, kernel: torch.optim.Optimizer, kept: Kept) -> int:
    """Master weights, moments and the weights that the model computes with; every process must call it.

    Args:
        engine: DeepSpeed's, which has made no step yet or goes back to one.
        kernel: the optimizer inside of it.

    Returns:
        The steps that the states have made.

    Raises:
        CheckpointError: it is of another model, or of an optimizer that ZeRO's parts cannot be made of.
    """
    parameters = {name: parameter for name, parameter in engine.module.named_parameters() if parameter.requires_grad}
    names = names_in(kept, engine.module)
    states = {name: kept.state(names[name]) for name in parameters}
    steps = {int(state["step"]) for state in states.values() if "step" in state}
    if len(steps) != 1 or any(key not in state for state in states.values() for key in OF_ADAM):
        raise CheckpointError(
            "ZeRO counts the steps of all parameters together and keeps Adam's two moments of each, and the"
            " checkpoint has"
            f" {'other states' if len(steps) == 1 else 'parameters that were updated in some steps only'}. Go on the"
            " way it was written."
        )
    made = steps.pop()
    stage3 = engine.zero_optimization_stage() == 3
    for flat in masters_of(engine, stage3=stage3):
        counted = kernel.state[flat].get("step", torch.zeros((), dtype=torch.float32, device=flat.device))
        step: Any = (
            torch.full_like(torch.as_tensor(counted, dtype=torch.float32), made)
            if not is_on_host_kernel(kernel)
            else made
        )
        kernel.state[flat] = {"step": step, **{key: torch.zeros_like(flat) for key in OF_ADAM}}
    gathered = engine.optimizer.persistent_parameters if stage3 else []
    if gathered:  # small ones, which ZeRO-3 never gives up: their parts are filled like all others
        gathered[0].partition(gathered)
    fill = fill_stage3 if stage3 else fill_parts
    for name, parameter in parameters.items():
        whole = {"fp32": kept.weight(names[name]), **{key: states[name][key] for key in OF_ADAM}}
        fill(engine, kernel, parameter, {key: value.flatten() for key, value in whole.items()})
    if gathered:
        gathered[0].all_gather(gathered)
    return made


def masters_of(engine: Any, *, stage3: bool) -> list[torch.Tensor]:
    """The flat fp32 weights of this process, a tensor for each of the optimizer's groups or sub-groups."""
    zero = engine.optimizer
    return list(zero.fp32_partitioned_groups_flat if stage3 else zero.single_partition_of_fp32_groups)


def is_on_host_kernel(kernel: torch.optim.Optimizer) -> bool:
    """DeepSpeed's AdamW for the host counts its steps in a number of Python's."""
    return type(kernel).__name__ == "DeepSpeedCPUAdam"


def written_by_host_kernel(checkpoint: Path, *, trust: bool = False) -> bool | None:
    """Whether DeepSpeed's AdamW for the host made these parts of ZeRO's; None where nothing tells.

    No other one can go on from its groups and its counters, nor it from theirs.
    """
    part = next(iter(sorted(checkpoint.glob("*/*optim_states.pt"))), None)
    states = {} if part is None else load_data(part, mmap=True, trust=trust).get("optimizer_state_dict", {})
    kept = states.get("base_optimizer_state") or states.get("optimizer_state_dict")
    if not isinstance(kept, dict) or "param_groups" not in kept:
        return None
    return any("bias_correction" in group for group in kept["param_groups"])


def fill_parts(
    engine: Any, kernel: torch.optim.Optimizer, parameter: nn.Parameter, whole: dict[str, torch.Tensor]
) -> None:
    """Stages 1 and 2: the model's weights are whole, and a stretch of some of them is this process's to update."""
    parameter.copy_(whole["fp32"].view(parameter.shape))
    mapping = vars(parameter).get("_hp_mapping")
    if mapping is None:
        return
    of_whole, of_part = mapping.lp_fragment_address, mapping.hp_fragment_address
    flat = engine.optimizer.single_partition_of_fp32_groups[mapping.param_group_index]
    for key, value in whole.items():
        part = flat if key == "fp32" else kernel.state[flat][key]
        part.narrow(0, of_part.start, of_part.numel).copy_(value.narrow(0, of_whole.start, of_whole.numel))


def fill_stage3(
    engine: Any, kernel: torch.optim.Optimizer, parameter: nn.Parameter, whole: dict[str, torch.Tensor]
) -> None:
    """Stage 3: this process has a stretch of every parameter, the last ones padded."""
    zero, kept = engine.optimizer, vars(parameter)
    group, begin, count = zero.grad_position[zero.get_param_id(parameter)]
    flat, first = zero.fp32_partitioned_groups_flat[group], count * zero._get_param_partition_rank(parameter)
    for key, value in whole.items():
        mine = value[first : first + count]
        part = (flat if key == "fp32" else kernel.state[flat][key]).narrow(0, begin, count)
        part.zero_()
        part[: mine.numel()].copy_(mine)
    mine = whole["fp32"][first : first + count]
    kept["ds_tensor"].view(-1)[: mine.numel()].copy_(mine)
