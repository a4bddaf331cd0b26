"""The loss guard's norms under ZeRO-2 and ZeRO-3, on named devices."""

import math
import types

import pytest
import torch
from deepspeed.runtime.utils import combine_grad_norm_groups
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from labelled_devices import labelled_devices

from cpt.training import step
from cpt.training.step import GuardedEngine

pytestmark = pytest.mark.heavy  # DeepSpeed takes seconds to import


@pytest.fixture(autouse=True)
def one_process(monkeypatch):
    alone = types.SimpleNamespace(all_reduce=lambda tensor: None, get_world_size=lambda: 1)
    monkeypatch.setattr(step, "dist", alone)


def guard_of(norms, *, skips):
    """The guard of an engine whose loss is on the GPU, and whose norms are where DeepSpeed has the gradients."""
    engine = GuardedEngine.__new__(GuardedEngine)
    engine.loss = torch.full((), 2.0, device="cuda")
    engine.engine = types.SimpleNamespace(optimizer=types.SimpleNamespace(loss_scale=1.0))
    engine.check = lambda metrics: (metrics > (0 if skips else 1e9)).any()
    engine.norm_of_all = lambda: norms[0]
    engine.norms_of_groups = lambda: norms
    return engine


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("skips", [False, True])
def test_zero2_clips_gradients_with_the_norm_that_it_gets_back(device, skips):
    with labelled_devices():
        norms = [torch.full((), 3.0, device=device)]
        gradient = torch.ones(10, device=device)
        optimizer = types.SimpleNamespace(clip_grad=1.0, loss_scale=1.0, device=device)
        norm = guard_of(norms, skips=skips).checked_norm()
        DeepSpeedZeroOptimizer.unscale_and_clip_grads(optimizer, [gradient], norm)
        assert norm.device == norms[0].device and norm.dtype == norms[0].dtype
        assert float(norm) == (math.inf if skips else 3.0)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("skips", [False, True])
def test_zero3_clips_gradients_with_the_norms_that_it_gets_back(device, skips):
    with labelled_devices():
        norms = [torch.full((), 3.0, device=device), torch.full((), 4.0, device=device)]
        gradient = torch.ones(10, device=device)
        group = types.SimpleNamespace(grad=gradient)
        optimizer = types.SimpleNamespace(
            clip_grad=1.0, loss_scale=1.0, fp32_partitioned_groups_flat=[group]
        )
        checked = guard_of(norms, skips=skips).checked_norms()
        DeepSpeedZeroOptimizer_Stage3.unscale_and_clip_grads(
            optimizer, 0, combine_grad_norm_groups(checked)
        )
        assert all(norm.device == given.device for norm, given in zip(checked, norms, strict=True))
        assert float(combine_grad_norm_groups(checked)) == (math.inf if skips else 5.0)
