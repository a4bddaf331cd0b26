import pytest
import torch
from one_process_group import alone_in_a_group
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from cpt.optim.gradients import clip_gradients, gradient_norm


def gradients(dtype):
    return [torch.full((1000,), 1 + 2**-7, dtype=dtype), torch.full((7, 3), 0.5, dtype=dtype)]


def test_the_norm_of_bfloat16_gradients_has_all_its_digits():
    exact = (1000 * (1 + 2**-7) ** 2 + 21 * 0.25) ** 0.5
    assert gradient_norm(gradients(torch.bfloat16)).item() == pytest.approx(exact, rel=1e-6)
    rough = torch.nn.utils.get_total_norm(gradients(torch.bfloat16)).item()
    assert abs(rough - exact) > 1e-4 * exact, "torch's own does not"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_they_are_scaled_down_to_the_limit_and_left_alone_below_it(dtype):
    large, small = gradients(dtype), gradients(dtype)
    before = clip_gradients(large, 2.0)
    assert before == gradient_norm(small) and gradient_norm(large).item() == pytest.approx(2.0, rel=5e-3)
    clip_gradients(small, 1000.0)
    assert all(torch.equal(one, other) for one, other in zip(small, gradients(dtype), strict=True))


def test_parts_have_the_norm_of_the_whole_and_are_clipped_in_place():
    with alone_in_a_group():
        mesh = init_device_mesh("cpu", (1,))
        parts = [distribute_tensor(gradient, mesh, [Shard(0)]) for gradient in gradients(torch.float32)]
        before = clip_gradients(parts, 2.0)
        assert type(before) is torch.Tensor and before == gradient_norm(gradients(torch.float32))
        assert gradient_norm(parts).item() == pytest.approx(2.0, rel=1e-5)
