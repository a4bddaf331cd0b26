import copy

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


CASES = [
    (Optimizer(name="adamw", learning_rate=1e-2), "float32"),
    (Optimizer(name="adamw", learning_rate=1e-2), "bfloat16"),
    (Optimizer(name="adamw_8bit", learning_rate=1e-2, rounding="stochastic"), "bfloat16"),
    (Optimizer(name="paged_adamw_8bit", learning_rate=1e-2, rounding="kahan"), "bfloat16"),
]


class LiveGradients:
    """Bytes of gradients that exist at once, seen whenever one is complete."""

    def __init__(self, model):
        self.parameters, self.most = list(model.parameters()), 0
        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(self.look)

    def look(self, _):
        self.most = max(self.most, sum(p.grad.nbytes for p in self.parameters if p.grad is not None))


def train(section, dtype, *, releases, count=6):
    """Losses, weights, states, the most bytes of gradients at once, and norms."""
    model = tiny_llama(dtype)
    optimizer = build_optimizer(section, model)
    live = LiveGradients(model)  # before the hooks that drop them
    released = ReleasedGradients(optimizer) if releases else None
    ids = torch.randint(4, model.config.vocab_size, (4, 16), generator=torch.Generator().manual_seed(0))
    losses, norms = [], []
    for _ in range(count):
        loss = model(input_ids=ids, labels=ids).loss
        if released is not None:
            released.begin(None)
        loss.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        norms.append(
            released.norm().item()
            if released is not None
            else torch.nn.utils.get_total_norm([g.float() for g in gradients]).item()
        )
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model.state_dict(), copy.deepcopy(optimizer.state_dict()), live.most, norms


@pytest.mark.parametrize(("section", "dtype"), CASES, ids=lambda value: getattr(value, "name", value))
def test_the_steps_are_those_of_whole_gradients_bit_for_bit_and_only_one_gradient_lives(monkeypatch, section, dtype):
    monkeypatch.setattr(adamw, "FEWEST_IN_8_BIT", 512)
    whole, parts = train(section, dtype, releases=False), train(section, dtype, releases=True)
    assert parts[0] == whole[0] and parts[0][-1] < parts[0][0]
    assert all(torch.equal(parts[1][name], tensor) for name, tensor in whole[1].items())
    assert same_states(parts[2], whole[2])
    assert parts[4] == pytest.approx(whole[4], rel=1e-5)
    largest, all_of_them = (f(p.nbytes for p in tiny_llama(dtype).parameters()) for f in (max, sum))
    assert parts[3] == largest and whole[3] == all_of_them


def same_states(one, other):
    assert one["param_groups"] == other["param_groups"] and one["state"].keys() == other["state"].keys()
    return all(
        torch.equal(value, other["state"][number][name])
        if torch.is_tensor(value)
        else value == other["state"][number][name]
        for number, state in one["state"].items()
        for name, value in state.items()
    )


@pytest.mark.parametrize(("section", "dtype"), CASES, ids=lambda value: getattr(value, "name", value))
def test_a_verdict_leaves_a_whole_step_out_and_a_bad_gradient_its_own_parameter(section, dtype):
    model = tiny_llama(dtype)
    released = ReleasedGradients(build_optimizer(section, model))
    ids = torch.arange(4, 68).view(4, 16)

    def changed(skip, spoil=None):
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        released.begin(skip)
        hook = spoil.register_hook(lambda gradient: gradient * torch.nan) if spoil is not None else None
        model(input_ids=ids, labels=ids).loss.backward()
        if hook is not None:
            hook.remove()
        return {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}

    everything = changed(None)
    assert len(everything) == len(list(model.parameters()))
    assert not changed(torch.tensor(True))
    assert changed(torch.tensor(False)) == everything
    assert changed(None, spoil=model.lm_head.weight) == everything - {"lm_head.weight"}
    assert not released.norm().isfinite()


def recipe(sections, folder, *overrides, **optimizer):
    sections = {
        **sections,
        "optimizer": {"name": "adamw", "learning_rate": 1e-3, "release_gradients": True, **optimizer},
    }
    sections["budget"] = {"tokens": 1024}
    fits = ["training.max_grad_norm=0", "training.gradient_accumulation_steps=1"]
    return load_recipe(write_recipe(sections, folder / "recipe.yaml"), [*fits, *overrides])


@pytest.mark.parametrize(
    ("overrides", "optimizer", "others"),
    [
        ([], {"name": "muon"}, {"deepspeed": False}),
        ([], {}, {"deepspeed": True}),
        ([], {}, {"deepspeed": False, "processes": 2}),
        (["training.fp16=true"], {}, {"deepspeed": False}),
        (["training.max_grad_norm=1.0"], {}, {"deepspeed": False}),
        (["training.gradient_accumulation_steps=4"], {}, {"deepspeed": False}),
    ],
)
def test_what_needs_a_whole_gradient_is_refused(tiny_recipe, tmp_path, overrides, optimizer, others):
    check_release(recipe(tiny_recipe, tmp_path), deepspeed=False)
    with pytest.raises(RecipeError, match="`optimizer.release_gradients`"):
        check_release(recipe(tiny_recipe, tmp_path, *overrides, **optimizer), **others)
