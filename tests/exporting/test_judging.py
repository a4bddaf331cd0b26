import json

import pytest
import torch
from tiny_checkpoints import save_llama
from transformers import AutoModelForCausalLM, AutoTokenizer

from cpt.checkpoints.proof import TEXT
from cpt.checkpoints.trained import Trained
from cpt.exporting.judged_text import in_windows
from cpt.exporting.judging import Judge, gain_of_run
from cpt.runs.folder import METRICS


@pytest.fixture(scope="module")
def model(tokenizer_folder, tmp_path_factory):
    return AutoModelForCausalLM.from_pretrained(
        save_llama(tmp_path_factory.mktemp("model") / "m", tokenizer_folder, seed=1)
    ).eval()


def judge_of(model, tokenizer_folder, **changes):
    text = in_windows("our passage", [TEXT], AutoTokenizer.from_pretrained(tokenizer_folder), model.config)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return Judge(text, torch.float32, **{"gain": None, "stated": None, "parameters": parameters, **changes})


def test_a_model_against_itself_costs_nothing_and_a_spoilt_one_does(model, tokenizer_folder):
    judge = judge_of(model, tokenizer_folder)
    before = judge.logits(model)
    same = judge.cost(before, model, num_bytes=judge.parameters)
    assert same.after == same.before and same.agreement == 1
    spoilt = judge.cost(before, lambda ids: -model(torch.tensor([ids])).logits[0].detach(), num_bytes=judge.parameters)
    assert spoilt.divergence > 0 and spoilt.agreement < 0.5


def test_fewer_bytes_may_cost_more(model, tokenizer_folder):
    judge = judge_of(model, tokenizer_folder)
    before = judge.logits(model)
    half, quarter = (judge.cost(before, model, num_bytes=judge.parameters * 2 // parts).allowed for parts in (2, 4))
    assert 0 < half < quarter


def test_the_gain_is_that_of_the_run_at_the_step_of_the_weights(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    lines = [{"step": step, "eval_chem_bits_per_byte": bits} for step, bits in ((0, 1.5), (4, 1.25), (8, 1.125))]
    (run / METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert gain_of_run(Trained(run / "checkpoint-4", "model", run, None)) == 0.25
    assert gain_of_run(Trained(run / "final", "model", run, None)) == 0.375
    assert gain_of_run(Trained(run / "final", "model", None, None)) is None
