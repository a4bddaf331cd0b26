import pytest
import torch

from cpt.stages.distill import summed_divergence


def by_hand(student, teacher, beta, temperature):
    """Equation by equation, in probabilities and float64 (arXiv 2306.13649, section 2)."""
    q, p = torch.softmax(student.double() / temperature, -1), torch.softmax(teacher.double() / temperature, -1)

    def kl(first, second):
        return (first * (first / second).log()).sum(-1)

    if beta == 0:
        return kl(p, q).sum()
    if beta == 1:
        return kl(q, p).sum()
    mixture = beta * p + (1 - beta) * q
    return (beta * kl(p, mixture) + (1 - beta) * kl(q, mixture)).sum()


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_value_and_gradient_are_those_of_the_formula(beta, temperature, monkeypatch):
    monkeypatch.setattr("cpt.stages.distill.TOKENS_AT_ONCE", 3)
    torch.manual_seed(0)
    student, teacher = (2 * torch.randn(10, 17)).requires_grad_(), 2 * torch.randn(10, 17)
    found = summed_divergence(student, teacher, beta=beta, temperature=temperature)
    (gradient,) = torch.autograd.grad(found, student)
    expected = by_hand(student, teacher, beta, temperature)
    (wanted,) = torch.autograd.grad(expected, student)
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    assert torch.allclose(gradient, wanted, atol=1e-6)


def test_logits_in_half_precision_are_compared_in_full():
    student, teacher = torch.randn(2, 8, 33, dtype=torch.bfloat16)
    found = summed_divergence(student, teacher, beta=0.0)
    assert found.dtype == torch.float32 and found.item() == pytest.approx(
        by_hand(student, teacher, 0.0, 1.0).item(), rel=1e-5
    )
