from dataclasses import dataclass

import pytest
import torch
from one_process_group import alone_in_a_group
from tiny import write_recipe
from tiny_training import tiny_llama
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from cpt.errors import RecipeError
from cpt.optim import adamw
from cpt.optim.build import build_optimizer
from cpt.optim.gradients import ReleasedGradients, check_release, clip_gradients, gradient_norm
from cpt.recipe.load import load_recipe
from cpt.recipe.schema import Optimizer


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
    assert before == gradient_norm(small) and gradient_norm(large).item() == pytest.approx(
        2.0, rel=5e-3
    )
    clip_gradients(small, 1000.0)
    assert all(torch.equal(one, other) for one, other in zip(small, gradients(dtype), strict=True))


def test_parts_have_the_norm_of_the_whole_and_are_clipped_in_place():
    with alone_in_a_group():
        mesh = init_device_mesh("cpu", (1,))
        parts = [
            distribute_tensor(gradient, mesh, [Shard(0)]) for gradient in gradients(torch.float32)
        ]
        before = clip_gradients(parts, 2.0)
        assert type(before) is torch.Tensor and before == gradient_norm(gradients(torch.float32))
        assert gradient_norm(parts).item() == pytest.approx(2.0, rel=1e-5)


# --- gradients that are released after their update ------------------------------------------------------------------

CASES = [
    (Optimizer(name="adamw", learning_rate=1e-2), "float32"),
    (Optimizer(name="adamw", learning_rate=1e-2), "bfloat16"),
    (Optimizer(name="paged_adamw_8bit", learning_rate=1e-2, rounding="kahan"), "bfloat16"),
]
IDS = torch.randint(4, 96, (4, 16), generator=torch.Generator().manual_seed(0))


@dataclass
class Course:
    """What some steps left."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, torch.Tensor]
    states: dict
    most_bytes: int  # of gradients that existed at the same time


def train(section, dtype, *, releases):
    model = tiny_llama(dtype)
    optimizer, parameters = build_optimizer(section, model), list(model.parameters())
    course = Course([], [], {}, {}, 0)

    def count_bytes(_):
        course.most_bytes = max(
            course.most_bytes, sum(p.grad.nbytes for p in parameters if p.grad is not None)
        )

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(count_bytes)  # before the hooks that drop them
    released = ReleasedGradients(optimizer) if releases else None
    for _ in range(6):
        loss = model(input_ids=IDS, labels=IDS).loss
        if released is not None:
            released.begin(None)
        loss.backward()
        whole = [p.grad.float() for p in parameters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(whole) if released is None else released.norm()
        optimizer.step()
        optimizer.zero_grad()
        course.losses.append(loss.item())
        course.norms.append(norm.item())
    course.weights, course.states = model.state_dict(), optimizer.state_dict()["state"]
    return course


@pytest.mark.heavy
@pytest.mark.parametrize(("section", "dtype"), CASES)
def test_the_steps_are_those_of_whole_gradients_bit_for_bit_and_only_one_gradient_lives(
    monkeypatch, section, dtype
):
    monkeypatch.setattr(adamw, "FEWEST_IN_8_BIT", 512)
    whole, parts = train(section, dtype, releases=False), train(section, dtype, releases=True)
    assert parts.losses == whole.losses and parts.losses[-1] < parts.losses[0]
    assert parts.norms == pytest.approx(whole.norms, rel=1e-5)
    assert all(torch.equal(parts.weights[name], tensor) for name, tensor in whole.weights.items())
    for number, state in whole.states.items():
        assert all(
            torch.equal(parts.states[number][name], tensor) for name, tensor in state.items()
        )
    sizes = [parameter.nbytes for parameter in tiny_llama(dtype).parameters()]
    assert (parts.most_bytes, whole.most_bytes) == (max(sizes), sum(sizes))


def recipe(sections, folder, *overrides, **optimizer):
    released = {"name": "adamw", "learning_rate": 1e-3, "release_gradients": True, **optimizer}
    written = write_recipe(
        {**sections, "optimizer": released, "budget": {"tokens": 1024}}, folder / "recipe.yaml"
    )
    fits = ["training.max_grad_norm=0", "training.gradient_accumulation_steps=1"]
    return load_recipe(written, [*fits, *overrides])


@pytest.mark.parametrize(
    ("overrides", "optimizer", "others"),
    [
        ([], {"name": "muon"}, {}),
        ([], {}, {"deepspeed": True}),
        ([], {}, {"processes": 2}),
        (["training.fp16=true"], {}, {}),
        (["training.max_grad_norm=1.0"], {}, {}),
        (["training.gradient_accumulation_steps=4"], {}, {}),
    ],
)
def test_a_run_that_needs_a_whole_gradient_is_refused(
    tiny_recipe, tmp_path, overrides, optimizer, others
):
    check_release(recipe(tiny_recipe, tmp_path), deepspeed=False)
    with pytest.raises(RecipeError, match=r"`optimizer\.release_gradients`"):
        check_release(
            recipe(tiny_recipe, tmp_path, *overrides, **optimizer), **{"deepspeed": False, **others}
        )
