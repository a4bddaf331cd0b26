import copy

import pytest
import torch
from tiny_training import learns_and_resumes, steps, tiny_llama

from cpt.errors import CheckpointError, RecipeError
from cpt.optim import small_adamw
from cpt.optim.build import build_optimizer
from cpt.optim.small_adamw import SmallAdamW, cut, pieces
from cpt.recipe.schema import Optimizer

bitsandbytes = pytest.importorskip("bitsandbytes")
ROUNDINGS = ("kahan", "stochastic", "nearest")


def small(groups, **changes):
    options = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "eight_bit": True, "paged": False, "rounding": "nearest"}
    return SmallAdamW(groups, **options | changes)


def matrix(dtype=torch.float32, seed=0, size=8192):
    return torch.nn.Parameter(torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype))


def walk(parameter, optimizer, count=20):
    for number in range(count):
        parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(100 + number)).to(parameter.dtype)
        optimizer.step()
    return parameter.detach().clone()


def test_fp32_weights_go_where_bitsandbytes_own_adamw_takes_them():
    mine, theirs, whole = matrix(), matrix(), matrix()
    found = walk(mine, small([{"params": [mine]}]))
    expected = walk(theirs, bitsandbytes.optim.AdamW8bit([theirs], lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1))
    exact = walk(whole, torch.optim.AdamW([whole], lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1))
    off, off_in_8_bit = (found - expected).abs(), (found - exact).abs()
    assert off.max() < 1e-4 and off.mean() < 0.01 * off_in_8_bit.mean(), "but for codes on the border between two"
    assert 1e-4 < off_in_8_bit.max() < 2e-2, "8 bit is near, and not the same"


def test_with_fp32_moments_it_is_torchs_adamw_bit_for_bit():
    mine, theirs = matrix(), matrix()
    found = walk(mine, small([{"params": [mine]}], eight_bit=False))
    assert torch.equal(found, walk(theirs, torch.optim.AdamW([theirs], lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=True)))


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("eight_bit", [True, False])
def test_pieces_and_pages_do_not_change_the_result(monkeypatch, rounding, eight_bit):
    monkeypatch.setattr(small_adamw, "FEWEST_ON_HOST", 1000)
    options = {"rounding": rounding, "eight_bit": eight_bit}
    whole = matrix(torch.bfloat16, size=5000)
    expected = walk(whole, small([{"params": [whole]}], **options))
    paged = matrix(torch.bfloat16, size=5000)
    assert torch.equal(walk(paged, small([{"params": [paged]}], paged=True, **options)), expected)
    if rounding != "stochastic":  # which draws for each piece
        monkeypatch.setattr(small_adamw, "PIECE", 512)
        cut_up = matrix(torch.bfloat16, size=5000)
        optimizer = small([{"params": [cut_up]}], **options)
        assert torch.equal(walk(cut_up, optimizer), expected) and optimizer.state[cut_up]["step"] == 20


def test_float16_weights_are_refused():
    with pytest.raises(RecipeError, match="Write `model.dtype: bfloat16`"):
        small([{"params": [matrix(torch.float16)]}])


def test_a_piece_has_its_own_blocks():
    assert list(pieces(5)) == [(0, 5)] and list(pieces(small_adamw.PIECE + 1))[1] == (small_adamw.PIECE, small_adamw.PIECE + 1)
    state = {"step": torch.zeros(()), "draws": 3, "exp_avg": torch.arange(1000), "exp_avg_scale": torch.arange(4)}
    found = cut(state, 512, 1000)
    assert set(found) == {"exp_avg", "exp_avg_scale"} and found["exp_avg_scale"].tolist() == [2, 3] and len(found["exp_avg"]) == 488


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("eight_bit", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_flag_on_the_device_leaves_weights_and_states_as_they_were(rounding, eight_bit, dtype):
    parameter = matrix(dtype)
    optimizer = small([{"params": [parameter]}], rounding=rounding, eight_bit=eight_bit)
    before = walk(parameter, optimizer, 3)
    states = copy.deepcopy(dict(optimizer.state[parameter]))
    optimizer.found_inf = torch.ones(())
    parameter.grad.fill_(torch.nan)
    optimizer.step()
    assert torch.equal(parameter, before)
    kept = {name: value for name, value in optimizer.state[parameter].items() if name != "draws"}
    assert all(torch.equal(value, states[name]) for name, value in kept.items())
    optimizer.found_inf = torch.zeros(())
    assert not torch.equal(walk(parameter, optimizer, 1), before)


@pytest.mark.parametrize("changes", [{"rounding": "kahan"}, {"rounding": "stochastic"}, {"eight_bit": False}])
def test_states_of_another_way_to_save_memory_are_refused(changes):
    parameter, other = matrix(torch.bfloat16), matrix(torch.bfloat16)
    optimizer = small([{"params": [parameter]}])
    walk(parameter, optimizer, 1)
    with pytest.raises(CheckpointError, match="Write name, rounding and `model.dtype` as they were"):
        small([{"params": [other]}], **changes).load_state_dict(optimizer.state_dict())


def test_embeddings_and_small_parameters_keep_fp32_moments():
    embedding, norm, weight = matrix(), matrix(size=64), matrix()
    optimizer = small([{"params": [embedding], "is_embedding": True}, {"params": [norm, weight]}])
    for parameter in (embedding, norm, weight):
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    types = [optimizer.state[parameter]["exp_avg"].dtype for parameter in (embedding, norm, weight)]
    assert types == [torch.float32, torch.float32, torch.uint8]


@pytest.mark.parametrize(("rounding", "bytes_each"), [("kahan", 4), ("stochastic", 2), ("nearest", 2)])
def test_states_take_the_bytes_that_are_planned(rounding, bytes_each):
    parameter = matrix(torch.bfloat16)
    optimizer = small([{"params": [parameter]}], rounding=rounding)
    walk(parameter, optimizer, 1)
    tensors = [value for value in optimizer.state[parameter].values() if isinstance(value, torch.Tensor)]
    scales = 2 * 4 * 8192 / 256
    assert sum(tensor.nbytes for tensor in tensors) == bytes_each * 8192 + scales + 4


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("name", ["adamw", "adamw_8bit", "paged_adamw_8bit"])
def test_it_learns_and_goes_on_from_its_saved_state_bit_for_bit(monkeypatch, name, rounding):
    monkeypatch.setattr(small_adamw, "FEWEST_IN_8_BIT", 512)
    monkeypatch.setattr(small_adamw, "FEWEST_ON_HOST", 512)
    learns_and_resumes(Optimizer(name=name, learning_rate=1e-2, rounding=rounding), "bfloat16")


@pytest.mark.slow
def test_the_loss_of_continued_pre_training_follows_fp32_with_kahan_and_stochastic_rounding_and_stalls_without(monkeypatch):
    monkeypatch.setattr(small_adamw, "FEWEST_IN_8_BIT", 512)

    def fallen(dtype, **options):
        trained = tiny_llama(dtype)
        losses = steps(trained, build_optimizer(Optimizer(learning_rate=1e-5, **options), trained), 60)
        return losses[0] - losses[-1]

    whole = fallen("float32", name="adamw")
    found = {rounding: fallen("bfloat16", name="adamw_8bit", rounding=rounding) for rounding in ROUNDINGS}
    assert found["kahan"] == pytest.approx(whole, rel=0.05) and found["stochastic"] == pytest.approx(whole, rel=0.1)
    assert found["nearest"] < 0.3 * whole
