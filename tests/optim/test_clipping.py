import pytest
import torch

from cpt.optim.clipping import clip_gradients, gradient_norm


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


def test_no_gradients_have_no_norm():
    assert gradient_norm([]) == 0
