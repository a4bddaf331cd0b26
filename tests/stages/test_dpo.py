"""DPO: its loss and log-probabilities are those of the paper, its reference is the model as the run found it, and it
resumes exactly."""

import pytest
import torch
from example_runs import build_run, example_rows
from torch.nn.functional import log_softmax, logsigmoid


def sequence_logps(model, prompt, answer):
    """log p(answer | prompt), token by token."""
    ids = torch.tensor([prompt + answer])
    logps = log_softmax(model(input_ids=ids).logits[0, :-1].float(), -1)
    wanted = logps.gather(-1, ids[0, 1:, None])[:, 0]
    return wanted[len(prompt) - 1 :].sum()


def by_hand(model, reference, rows, beta):
    """Equation 7 of arXiv 2305.18290."""
    losses, chosen, rejected = [], [], []
    for row in rows:
        policy = [sequence_logps(model, row["prompt_ids"], row[name]) for name in ("chosen_ids", "rejected_ids")]
        with torch.no_grad():
            before = [
                sequence_logps(reference, row["prompt_ids"], row[name]) for name in ("chosen_ids", "rejected_ids")
            ]
        losses.append(-logsigmoid(beta * ((policy[0] - before[0]) - (policy[1] - before[1]))))
        chosen.append(policy[0])
        rejected.append(policy[1])
    return torch.stack(losses).mean(), torch.stack(chosen).mean(), torch.stack(rejected).mean()


def test_loss_and_log_probabilities_are_those_written_by_hand(tmp_path):
    trainer = build_run("dpo", tmp_path, training={"beta": 0.3})
    reference = trainer.ref_model
    with torch.no_grad():  # away from the reference, where the loss would be log 2 whatever the formula
        for parameter in trainer.model.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    rows = example_rows("dpo")[:4]
    loss = trainer.compute_loss(trainer.model, trainer._prepare_inputs(trainer.collate_examples()(rows)))
    trainer.model.zero_grad()
    loss.backward()
    gradients = {
        name: parameter.grad.clone()
        for name, parameter in trainer.model.named_parameters()
        if parameter.grad is not None
    }
    trainer.model.zero_grad()
    wanted, chosen, rejected = by_hand(trainer.model, reference, rows, beta=0.3)
    wanted.backward()
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-5)
    assert trainer._metrics["train"]["logps/chosen"][-1] == pytest.approx(chosen.item(), rel=1e-5)
    assert trainer._metrics["train"]["logps/rejected"][-1] == pytest.approx(rejected.item(), rel=1e-5)
    for name, parameter in trainer.model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-7)


def test_the_margin_begins_at_0_and_grows(tmp_path):
    trainer = build_run("dpo", tmp_path, steps=10)
    trainer.train()
    margins = [line["rewards/margins"] for line in trainer.state.log_history if "rewards/margins" in line]
    assert margins[0] == pytest.approx(0, abs=1e-6) and margins[-1] > 0.2


def test_the_reference_is_not_trained(tmp_path):
    trainer = build_run("dpo", tmp_path, steps=3)
    before = {name: value.clone() for name, value in trainer.ref_model.state_dict().items()}
    trainer.train()
    assert all(torch.equal(before[name], value) for name, value in trainer.ref_model.state_dict().items())
    assert not any(parameter.requires_grad for parameter in trainer.ref_model.parameters())


def test_with_an_adapter_the_reference_is_the_model_without_it(tmp_path):
    trainer = build_run("dpo", tmp_path, steps=3, lora={"r": 4})
    assert trainer.ref_model is None and [*trainer.model.peft_config] == ["default"]
    trainer.train()
    margins = [line["rewards/margins"] for line in trainer.state.log_history if "rewards/margins" in line]
    assert margins[0] == pytest.approx(0, abs=1e-6) and margins[-1] > 0
