import pytest
import torch

from cpt.synthesis.sampling import GumbelNoise, mixed


def draws(logits, seeds, prompt_length=1, tokens=1):
    ids = torch.zeros(len(seeds), prompt_length + tokens, dtype=torch.long)
    return GumbelNoise(seeds, prompt_length)(ids, logits.expand(len(seeds), -1)).argmax(-1)


def test_the_largest_logit_with_noise_is_a_draw_from_the_softmax():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    drawn = draws(logits, range(2**40, 2**40 + 40_000))
    shares = torch.bincount(drawn, minlength=4) / len(drawn)
    torch.testing.assert_close(shares, logits.softmax(-1), atol=0.01, rtol=0)


def test_mixing_is_splitmix64():
    """As the reference gives it for the state 1234567 (prng.di.unimi.it/splitmix64.c)."""
    golden = 0x9E3779B97F4A7C15
    states = torch.tensor([(1234567 + golden * n + 2**63) % 2**64 - 2**63 for n in (1, 2, 3)])
    assert [int(number) % 2**64 for number in mixed(states)] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


@pytest.mark.gpu
def test_a_gpu_draws_what_the_cpu_draws():
    seeds, logits = list(range(64)), torch.randn(64, 5000)
    ids = torch.zeros(64, 3, dtype=torch.long)
    noise = GumbelNoise(seeds, 1)
    assert torch.equal(noise(ids, logits).argmax(-1), noise(ids.cuda(), logits.cuda()).argmax(-1).cpu())
