from dataclasses import dataclass

import pytest
import torch
from one_process_group import alone_in_a_group
from threads_as_ranks import on_ranks
from tiny import write_recipe
from tiny_training import tiny_llama
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from cpt.errors import RecipeError
from cpt.optim import adamw
from cpt.optim.build import build_optimizer, check_release
from cpt.optim.gradients import ReleasedGradients, clip_gradients, gradient_norm
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


def test_the_norm_of_parts_is_over_the_processes_that_share_them():
    """Four processes hold two copies: each copy is whole, and counts once."""
    whole = gradients(torch.float32)

    def norm_of(rank):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copy", "part"))["part"]
        parts = [part.chunk(2)[rank % 2] for part in whole]
        return gradient_norm([DTensor.from_local(part, mesh, [Shard(0)]) for part in parts])

    for norm in on_ranks(4, norm_of):
        assert norm.item() == pytest.approx(gradient_norm(whole).item(), rel=1e-6)


# --- gradients that are released after their update ------------------------------------------------------------------

CASES = [
    (Optimizer(name="adamw", learning_rate=1e-2), "float32"),
    (Optimizer(name="adamw", learning_rate=1e-2), "bfloat16"),
    (Optimizer(name="adamw", learning_rate=1e-2, rounding="kahan"), "bfloat16"),
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
    section, dtype
):
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
    """One that may release its gradients, but for the overrides; `-key` leaves a key out."""
    released = {"name": "adamw", "learning_rate": 1e-3, "release_gradients": True, **optimizer}
    written = write_recipe(
        {**sections, "optimizer": released, "budget": {"tokens": 1024}}, folder / "recipe.yaml"
    )
    fits = ["training.max_grad_norm=0", "training.gradient_accumulation_steps=1"]
    kept = [one for one in fits if f"-{one.partition('=')[0]}" not in overrides]
    return load_recipe(written, [*kept, *(one for one in overrides if one[0] != "-")])


USE = "`muon`. Use adamw or paged_adamw_8bit, or write false."
LATE = "the norm is only known after the updates, too late for clipping. Write `training.max_grad_norm: 0`."
BATCHES = " micro-batches per step. Write `training.gradient_accumulation_steps: 1`."


@pytest.mark.parametrize(
    ("overrides", "optimizer", "others", "reason"),
    [
        ([], {"name": "muon"}, {}, f"an update needs the whole gradient with {USE}"),
        (
            [],
            {},
            {"deepspeed": True},
            "DeepSpeed manages the gradients. Write false, or remove `training.deepspeed`.",
        ),
        (
            [],
            {},
            {"processes": 3},
            "it supports one GPU, not 3. Write false, and use DeepSpeed's ZeRO-2.",
        ),
        (
            ["training.fp16=true"],
            {},
            {},
            "an update needs the whole gradient to find the scale of fp16. Write `training.bf16: true` instead.",
        ),
        (["training.max_grad_norm=1.0"], {}, {}, LATE),
        (["-training.max_grad_norm"], {}, {}, LATE),
        (
            ["training.gradient_accumulation_steps=4"],
            {},
            {},
            f"`training.gradient_accumulation_steps` means 4{BATCHES}",
        ),
        (
            ["-training.gradient_accumulation_steps", "budget.global_batch_tokens=384"],
            {},
            {},
            f"`budget.global_batch_tokens` means 3{BATCHES}",
        ),
        (["training.max_grad_norm=1.0"], {"release_gradients": False}, {"processes": 2}, None),
    ],
)
def test_a_run_that_needs_a_whole_gradient_is_refused_with_the_reason(
    tiny_recipe, tmp_path, overrides, optimizer, others, reason
):
    check_release(recipe(tiny_recipe, tmp_path), deepspeed=False)
    asked = recipe(tiny_recipe, tmp_path, *overrides, **optimizer)
    if reason is None:
        check_release(asked, **{"deepspeed": False, **others})
        return
    with pytest.raises(RecipeError) as refused:
        check_release(asked, **{"deepspeed": False, **others})
    assert str(refused.value) == f"`optimizer.release_gradients`: {reason}"


def test_each_released_parameter_has_the_rate_of_its_group_and_a_broken_gradient_costs_only_its_own():
    values = [3.0, 4.0, 12.0]
    weights = [torch.nn.Parameter(torch.zeros(1).bfloat16()) for _ in values]
    groups = [{"params": weights[:2], "lr": 0.5}, {"params": weights[2:], "lr": 0.25}]
    optimizer = adamw.OneKernelAdamW(groups, lr=1.0, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    released = ReleasedGradients(optimizer)

    def step(skip, *changes):
        released.begin(skip)
        factors = [*changes, 1.0, 1.0, 1.0][:3]
        sum(w * v * f for w, v, f in zip(weights, values, factors, strict=True)).backward()
        assert all(weight.grad is None for weight in weights)
        assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.25]
        return [weight.item() for weight in weights]

    assert released.norm() == 0
    assert step(None) == pytest.approx([-0.5, -0.5, -0.25], rel=1e-2)
    assert released.norm() == 13
    before = [weight.item() for weight in weights]
    assert step(torch.tensor(True)) == before and released.norm() == 13
    after = step(torch.tensor(False), torch.inf)
    assert after[0] == before[0] and after[1:] == pytest.approx([-1.0, -0.5], rel=1e-2)
    assert released.norm() == torch.inf
    assert [optimizer.state[weight]["step"] for weight in weights] == [1, 2, 2]
    released.remove()
    weights[0].sum().backward()
    assert weights[0].grad == 1 and optimizer.found_inf is None


def test_without_gradients_the_norm_is_zero():
    assert gradient_norm([]) == 0
