"""Every optimizer by its name: which parameters get which rate and decay, that it learns and resumes, and what is
refused."""

import copy
from contextlib import nullcontext

import pytest
import torch
from tiny import write_recipe
from tiny_models import tiny_model
from tiny_training import learns_and_resumes, steps, tiny_llama
from torch import nn

from cpt.errors import RecipeError, ResourceError
from cpt.optim.build import (
    build_optimizer,
    check_optimizer,
    check_rounding,
    convert_adamw,
    muon,
    replay_step_counter,
    shampoo,
    soap,
)
from cpt.optim.groups import MATRICES, parameter_groups
from cpt.recipe.load import load_recipe
from cpt.recipe.schema import Optimizer


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.linear = nn.Linear(4, 3)
        self.norm = nn.LayerNorm(3)


def values_of(key, model, groups):
    """A value of its group by a parameter's name."""
    values = {id(parameter): group.get(key) for group in groups for parameter in group["params"]}
    return {
        name: values[id(parameter)]
        for name, parameter in model.named_parameters()
        if id(parameter) in values
    }


# --- groups ----------------------------------------------------------------------------------------------------------


def test_embeddings_norms_and_biases_have_no_weight_decay():
    model = Tiny()
    groups = build_optimizer(
        Optimizer(name="adamw", learning_rate=1e-3, weight_decay=0.3), model
    ).param_groups
    decays = {name for name, decay in values_of("weight_decay", model, groups).items() if decay}
    assert decays == {"linear.weight"}


def test_matrices_of_layers_are_told_from_embeddings_head_and_norms():
    llama = tiny_llama()
    layers = {name for name, _ in llama.named_parameters() if name.endswith("_proj.weight")}
    matrices = values_of(MATRICES, llama, parameter_groups(llama, matrices_apart=True))
    assert {name for name, is_matrix in matrices.items() if is_matrix} == layers
    decays = values_of("weight_decay", llama, parameter_groups(llama))
    assert {name for name, decay in decays.items() if decay is None} == {*layers, "lm_head.weight"}


def test_trained_embeddings_have_a_rate_of_their_own_and_frozen_ones_cannot():
    section = Optimizer(learning_rate=1e-3, embedding_learning_rate=1e-4)
    model = tiny_model("llama", lora="cpt")
    rates = values_of("lr", model, build_optimizer(section, model).param_groups)
    ends = {name for name, rate in rates.items() if rate == 1e-4}
    assert {name.split(".")[-4] for name in ends} == {"embed_tokens", "lm_head"}
    assert all("lora_" in name for name in rates if name not in ends)
    with pytest.raises(RecipeError, match=r"`optimizer\.embedding_learning_rate`"):
        build_optimizer(section, tiny_model("llama", lora={}))


ADAMW = {"weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-8}
MUON = {"momentum": 0.95, "nesterov": True, "ns_steps": 5, "adjust_lr_fn": "match_rms_adamw"}
SHAMPOO = {"decoupled_weight_decay": True, "preconditioning_compute_steps": 10, "block_size": 512}
SOAP = {"precondition_frequency": 10, "max_precondition_dim": 10_000}
CHANGES = {"betas": [0.8, 0.7], "eps": 1e-4, "weight_decay": 0.3}
OF_SHAMPOO = {"preconditioning_compute_steps": 3, "block_size": 64}


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"name": "adamw"}, {**ADAMW, "fused": True, "amsgrad": False}),
        ({"name": "adamw", **CHANGES}, {"fused": True}),
        ({"name": "sgd"}, {"momentum": 0.0, "weight_decay": 0.0, "nesterov": False}),
        ({"name": "sgd", "momentum": 0.8, "weight_decay": 0.2}, {}),
        ({"name": "muon"}, {"weight_decay": 0.1, **MUON}),
        (
            {
                "name": "muon",
                "momentum": 0.8,
                "nesterov": False,
                "ns_steps": 3,
                "weight_decay": 0.2,
            },
            {"adjust_lr_fn": "match_rms_adamw"},
        ),
        ({"name": "soap"}, {"betas": (0.95, 0.95), "eps": 1e-8, "weight_decay": 0.01, **SOAP}),
        ({"name": "soap", **CHANGES, "precondition_frequency": 3, "max_precondition_dim": 99}, {}),
        ({"name": "shampoo"}, {"betas": (0.9, 0.999), "weight_decay": 0.01, **SHAMPOO}),
        ({"name": "shampoo", "betas": [0.8, 0.7], "weight_decay": 0.3, **OF_SHAMPOO}, {}),
    ],
)
def test_a_library_gets_the_defaults_that_are_documented_or_what_the_recipe_says(section, expected):
    if section["name"] in ("soap", "shampoo"):
        pytest.importorskip("pytorch_optimizer")
    built = build_optimizer(Optimizer(**section, learning_rate=3e-3), Tiny())
    group = next(
        group
        for group in built.param_groups
        if any(parameter.shape == (3, 4) for parameter in group["params"])
    )
    said = {
        name: tuple(value) if isinstance(value, list) else value for name, value in section.items()
    }
    said.pop("name")
    asked = {"lr": 3e-3, **expected, **said}
    found = vars(built) | built.defaults | group
    assert {name: found.get(name) for name in asked} == asked


def test_muon_gives_the_rest_to_adamw_with_its_own_options():
    section = Optimizer(name="muon", learning_rate=3e-3, betas=[0.8, 0.7], eps=1e-4)
    plain, changed = (
        build_optimizer(one, Tiny()).parts[1]
        for one in (Optimizer(name="muon", learning_rate=3e-3), section)
    )
    assert type(plain) is torch.optim.AdamW
    for part, betas, eps in ((plain, (0.9, 0.95), 1e-8), (changed, (0.8, 0.7), 1e-4)):
        for group in part.param_groups:
            found = [group[name] for name in ("lr", "betas", "eps", "fused", "weight_decay")]
            assert found == [3e-3, betas, eps, True, 0.0]


@pytest.mark.parametrize("name", ["muon", "adamw", "sgd"])
def test_an_embedding_rate_is_that_of_embeddings_and_head_and_of_nothing_else(name):
    model = tiny_llama()
    section = Optimizer(name=name, learning_rate=1e-3, embedding_learning_rate=1e-4)
    rates = values_of("lr", model, build_optimizer(section, model).param_groups)
    ends = {"model.embed_tokens.weight", "lm_head.weight"}
    assert rates == {name: 1e-4 if name in ends else 1e-3 for name, _ in model.named_parameters()}


class OnHost(torch.optim.Optimizer):
    """What DeepSpeed's AdamW for the host stores and is asked for."""

    def __init__(self, groups, adamw_mode=False, **options):
        super().__init__(groups, {"bias_correction": True, "amsgrad": False, **options})
        self.asked, self.opt_id, self.ds_opt_adam = {"adamw_mode": adamw_mode, **options}, 7, self
        self.updates = []

    def adam_update(self, *settings):
        self.updates.append([one.tolist() if torch.is_tensor(one) else one for one in settings])


class OnlyWeights(nn.Module):
    """Its optimizer has one group."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3, bias=False)


@pytest.fixture(params=[Tiny, OnlyWeights])
def small_model(request):
    return request.param


@pytest.fixture
def on_host(small_model, monkeypatch):
    monkeypatch.setattr("deepspeed.ops.adam.DeepSpeedCPUAdam", OnHost)
    section = Optimizer(name="adamw", learning_rate=3e-3, **CHANGES)
    return build_optimizer(section, small_model(), partitioned=True, offloaded=True)


def test_deepspeeds_optimizer_for_the_host_gets_the_recipes_options(on_host, monkeypatch):
    options = {"lr": 3e-3, "betas": (0.8, 0.7), "eps": 1e-4, "weight_decay": 0.3}
    assert type(on_host) is OnHost and on_host.asked == {"adamw_mode": True, **options}

    def fail(*_, **__):
        raise RuntimeError("no compiler")

    monkeypatch.setattr("deepspeed.ops.adam.DeepSpeedCPUAdam", fail)
    with pytest.raises(ResourceError, match=r"needs g\+\+: no compiler"):
        build_optimizer(Optimizer(name="adamw"), Tiny(), partitioned=True, offloaded=True)


@pytest.mark.parametrize("to_host", [True, False])
def test_states_of_adamw_become_those_of_the_other_one_with_the_saved_options(
    small_model, on_host, to_host
):
    section = Optimizer(name="adamw", learning_rate=3e-3, **CHANGES)
    of_torch = build_optimizer(section, small_model(), partitioned=True)
    before, after = (of_torch, on_host) if to_host else (on_host, of_torch)
    assert not convert_adamw(before) and not convert_adamw(after)
    own = [group.keys() for group in after.param_groups]
    for group in before.param_groups:
        group["lr"] = 1e-5
        for number, parameter in enumerate(group["params"], start=5):
            step = torch.tensor(float(number)) if to_host else number
            before.state[parameter] = {"step": step, "exp_avg": torch.full_like(parameter, number)}
    after.load_state_dict(copy.deepcopy(before.state_dict()))
    assert convert_adamw(after) is True and convert_adamw(after) is False
    assert all(keys <= group.keys() for keys, group in zip(own, after.param_groups, strict=True))
    assert ["bias_correction" in group for group in after.param_groups] == [to_host] * len(own)
    for group in after.param_groups:
        found = [group[name] for name in ("lr", "betas", "eps")]
        assert found == [1e-5, (0.8, 0.7), 1e-4] and group["weight_decay"] in (0.3, 0.0)
        for number, parameter in enumerate(group["params"], start=5):
            state = after.state[parameter]
            assert state["step"] == number and torch.is_tensor(state["step"]) is not to_host
            assert torch.equal(state["exp_avg"], torch.full_like(parameter, number))


def test_the_steps_of_deepspeeds_kernel_are_counted_again_and_others_are_left_alone(on_host):
    replay_step_counter(on_host)
    assert on_host.updates == []
    for steps_made, parameter in enumerate(on_host.param_groups[0]["params"], start=2):
        on_host.state[parameter] = {"step": steps_made}
    replay_step_counter(on_host)
    most = len(on_host.param_groups[0]["params"]) + 1
    numbers = [[0.0]] * 4
    assert on_host.updates == [
        [7, step, 3e-3, 0.8, 0.7, 1e-4, 0.0, True, *numbers] for step in range(1, most + 1)
    ]
    replay_step_counter(torch.optim.AdamW(Tiny().parameters()))


# --- learning --------------------------------------------------------------------------------------------------------


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("name", "rate"),
    [("muon", 2e-2), ("soap", 5e-3), ("shampoo", 5e-2), ("torch.optim:NAdam", 5e-3)],
)
def test_it_learns_and_resumes_from_its_saved_state_bit_for_bit(name, rate):
    if name in ("soap", "shampoo"):
        pytest.importorskip("pytorch_optimizer")
    learns_and_resumes(Optimizer(name=name, learning_rate=rate))


def test_muon_makes_matrices_orthogonal_and_leaves_the_rest_to_adamw():
    model = tiny_llama()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    steps(
        model,
        build_optimizer(Optimizer(name="muon", learning_rate=1e-3, weight_decay=0.0), model),
        1,
    )
    moved = {
        name: before[name] - parameter.detach() for name, parameter in model.named_parameters()
    }
    values = torch.linalg.svdvals(moved["model.layers.0.mlp.up_proj.weight"])
    assert values.min() > 0.3 * values.max()  # Newton-Schulz leaves them between 0.7 and 1.2
    # AdamW's first step is the rate, for each number.
    assert moved["lm_head.weight"].abs().max() == pytest.approx(1e-3, rel=0.05)


@pytest.mark.parametrize("shape", [(16, 1024), (64, 64), (1024, 16)])
def test_muons_updates_are_as_large_as_adamws_whatever_the_shape(shape):
    """0.2 of the rate for each number (arXiv 2502.16982, section 2.2)."""
    matrix = nn.Parameter(torch.zeros(shape))
    matrix.grad = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    muon([{"params": [matrix], MATRICES: True}], 1e-3).step()
    # Newton-Schulz leaves singular values near 0.7 to 1.2.
    assert matrix.detach().square().mean().sqrt().item() == pytest.approx(0.2e-3, rel=0.35)


@pytest.mark.parametrize("build", [soap, shampoo])
def test_weights_decay_by_rate_times_decay_and_not_through_the_preconditioner(build):
    pytest.importorskip("pytorch_optimizer")
    matrix = nn.Parameter(torch.ones(4, 4))
    optimizer = build([{"params": [matrix]}], 0.1, weight_decay=0.5)
    for _ in range(3):
        matrix.grad = torch.full((4, 4), 1e-12)
        before = matrix.detach().clone()
        optimizer.step()
    assert matrix.detach().mean().item() == pytest.approx(0.95 * before.mean().item(), rel=1e-3)


# --- what is refused or warned of ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "engine", "key"),
    [
        (Optimizer(name="adamv"), {}, "adamv"),
        (Optimizer(name="adamw", beta=0.9), {}, r"`optimizer\.beta`"),
        (Optimizer(name="adamw", rounding="up"), {}, r"`optimizer\.rounding`"),
        (Optimizer(name="adamw_8bit", rounding="kahan"), {}, r"`optimizer\.rounding`"),
        (Optimizer(name="sgd"), {"offloaded": True}, r"`optimizer\.name`"),
        (Optimizer(name="adamw_8bit"), {"partitioned": True}, r"`optimizer\.name`"),
        (
            Optimizer(name="muon"),
            {"partitioned": True},
            r"`optimizer\.name`.*DeepSpeed/issues/8439",
        ),
        (
            Optimizer(name="adamw", rounding="kahan"),
            {"partitioned": True},
            r"`optimizer\.rounding`",
        ),
    ],
)
def test_a_wrong_optimizer_is_a_recipe_error(section, engine, key):
    with pytest.raises(RecipeError, match=key):
        build_optimizer(section, Tiny(), **engine)


def test_options_of_a_class_are_its_own_arguments():
    section = Optimizer(name="torch.optim:NAdam", learning_rate=1e-3, betas=[0.8, 0.9])
    built = build_optimizer(section, Tiny())
    assert built.defaults["betas"] == (0.8, 0.9) and built.defaults["lr"] == 1e-3
    with pytest.raises(RecipeError, match=r"`optimizer\.momentum_decoy`"):
        check_optimizer(Optimizer(name="torch.optim:NAdam", momentum_decoy=0.1))


@pytest.mark.parametrize("options", [{}, {"rounding": None}])
def test_deepspeed_gets_torchs_adamw_whatever_the_weights_are(options):
    section = Optimizer(name="adamw", **options)
    assert type(build_optimizer(section, Tiny().bfloat16(), partitioned=True)) is torch.optim.AdamW


@pytest.mark.slow
@pytest.mark.parametrize("to_host", [True, False])
def test_states_of_adamw_move_between_torchs_and_deepspeeds_for_the_host(to_host):
    def built(offloaded):
        torch.manual_seed(0)
        model = Tiny()
        return model, build_optimizer(Optimizer(), model, partitioned=True, offloaded=offloaded)

    def update(model, optimizer, seed):
        torch.manual_seed(seed)
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()

    (model, before), (other, after) = built(not to_host), built(to_host)
    own = [group.keys() for group in after.param_groups]
    for seed in range(3):
        update(model, before, seed)
    other.load_state_dict(model.state_dict())
    after.load_state_dict(copy.deepcopy(before.state_dict()))
    assert convert_adamw(after) and not convert_adamw(after)
    assert all(keys <= group.keys() for keys, group in zip(own, after.param_groups, strict=True))
    for pair in zip(before.state.values(), after.state.values(), strict=True):
        moments = [[state[name] for name in ("exp_avg", "exp_avg_sq")] for state in pair]
        assert all(map(torch.equal, *moments)) and len({int(state["step"]) for state in pair}) == 1
    update(model, before, 3)
    update(other, after, 3)
    for one, same in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, same, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("name", "dtype", "warns"),
    [
        ("sgd", torch.bfloat16, True),
        ("sgd", torch.float32, False),
        ("adamw", torch.bfloat16, False),
    ],
)
def test_bfloat16_weights_without_a_copy_are_warned_of(caplog, name, dtype, warns):
    build_optimizer(Optimizer(name=name), Tiny().to(dtype))
    assert ("fp32 copy" in caplog.text) is warns


@pytest.mark.parametrize(
    ("overrides", "is_rounded"),
    [
        (["model.dtype=bfloat16"], True),
        ([], False),
        (["model={path: a/b, lora: {}, dtype: bfloat16}", "stage=cpt"], False),
    ],
)
def test_a_rounding_of_weights_that_are_not_rounded_is_refused(
    tiny_recipe, tmp_path, overrides, is_rounded
):
    sections = {**tiny_recipe, "optimizer": {"name": "adamw", "rounding": "kahan"}}
    recipe = load_recipe(write_recipe(sections, tmp_path / "r.yaml"), overrides)
    with (
        nullcontext() if is_rounded else pytest.raises(RecipeError, match=r"`optimizer\.rounding`")
    ):
        check_rounding(recipe)


@pytest.mark.parametrize(
    ("name", "dtype", "is_refused"),
    [
        ("adamw", torch.bfloat16, True),
        ("adamw", torch.float32, False),
        ("muon", torch.float32, False),
    ],
)
def test_an_optimizer_with_a_kernel_of_its_own_needs_triton(monkeypatch, name, dtype, is_refused):
    model = Tiny().to(dtype)
    build_optimizer(Optimizer(name=name), model)
    monkeypatch.setenv("CPT_TRITON_FAILURE", "no C compiler")
    with pytest.raises(ResourceError, match="no C compiler") if is_refused else nullcontext():
        build_optimizer(Optimizer(name=name), model)
    if name == "adamw":
        build_optimizer(
            Optimizer(name=name), model, partitioned=True
        )  # DeepSpeed keeps the fp32 weights


@pytest.mark.heavy
def test_on_a_gpu_machine_deepspeeds_optimizer_for_the_host_compiles_without_a_cuda_toolkit(
    monkeypatch,
):
    from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator  # seconds to import
    from deepspeed.ops.op_builder.builder import CUDAOpBuilder

    monkeypatch.setattr("torch.utils.cpp_extension.CUDA_HOME", None)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    builder = CUDA_Accelerator().create_op_builder("CPUAdamBuilder")
    assert not isinstance(builder, CUDAOpBuilder) and builder.is_compatible()
    assert all(source.endswith(".cpp") for source in builder.sources())
