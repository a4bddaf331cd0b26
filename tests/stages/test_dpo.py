"""DPO's reference is the model as the run found it."""

import pytest
import torch
from example_runs import build_run


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
