import pytest
import torch

from cpt.commands.rewriting_model import SeededDraws


def draws(logits, seeds, prompt_length=1, tokens=1):
    ids = torch.zeros(len(seeds), prompt_length + tokens, dtype=torch.long)
    return SeededDraws(seeds, prompt_length, tokens + 1)(ids, logits.expand(len(seeds), -1)).argmax(-1)


def test_draws_follow_the_softmax():
    logits = torch.tensor([2.0, 1.0, -torch.inf, 0.0, -1.0])
    drawn = draws(logits, range(2**40, 2**40 + 40_000))
    shares = torch.bincount(drawn, minlength=5) / len(drawn)
    torch.testing.assert_close(shares, logits.softmax(-1), atol=0.01, rtol=0)


@pytest.mark.gpu
def test_a_gpu_draws_what_the_cpu_draws():
    seeds, logits = list(range(64)), torch.randn(64, 5000)
    ids = torch.zeros(64, 3, dtype=torch.long)
    draw = SeededDraws(seeds, 1, 4)
    assert torch.equal(draw(ids, logits).argmax(-1), draw(ids.cuda(), logits.cuda()).argmax(-1).cpu())
