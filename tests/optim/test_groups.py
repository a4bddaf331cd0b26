"""Which parameters have weight decay, in families with every kind of parameter."""

import re
from pathlib import Path

import pytest
import torch
from approved import check_approved
from causal_families import small_config
from tiny import TINY_LLAMA
from tiny_trainers import trainer_of
from torch import nn
from transformers import AutoModelForCausalLM

from cpt.checkpoints.manifest import BY_DIMENSION, MANIFEST, read_manifest
from cpt.checkpoints.resume import ResumePoint
from cpt.files import sealed, unsealed
from cpt.optim.groups import MATRICES, parameter_groups

TABLE = Path(__file__).with_name("approved_undecayed.txt")
FAMILIES = (
    "bamba bloom cohere2 cpmant deepseek_v3 deepseek_v4 falcon_h1 falcon_mamba gemma2 gemma3n_text gpt2 gpt_neox "
    "gpt_oss inkling2_text jamba kimi_linear llama longcat_flash mamba mamba2 minimind3_moe mixtral nemotron_h opt "
    "qwen2_moe qwen3_next recurrent_gemma rwkv xlnet xlstm zamba2"
)


def built(family):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(small_config(family))
    model.tie_weights()
    return model


def undecayed(model, **options):
    """Names of parameters without weight decay, `*` for their numbers."""
    groups = parameter_groups(model, **options)
    grouped = [id(parameter) for group in groups for parameter in group["params"]]
    assert sorted(grouped) == sorted(map(id, model.parameters())), "a tied weight is there once"
    without = [group for group in groups if "weight_decay" in group]
    ids = {id(parameter) for group in without for parameter in group["params"]}
    names = [name for name, parameter in model.named_parameters() if id(parameter) in ids]
    return sorted({re.sub(r"\.\d+(?=\.|$)", ".*", name) for name in names})


def test_the_parameters_without_weight_decay_are_approved():
    """`CPT_RENEW_APPROVED=1 pytest FILE` writes the table."""
    blocks = [
        f"{family}\n  " + "\n  ".join(undecayed(built(family))) for family in FAMILIES.split()
    ]
    check_approved("\n".join(blocks) + "\n", TABLE)


@pytest.mark.parametrize("family", ["gpt_oss", "recurrent_gemma", "rwkv"])
def test_a_bias_stored_as_a_matrix_is_no_matrix_for_muon(family):
    model = built(family)
    groups = parameter_groups(model, matrices_apart=True)
    matrices = {id(weight) for group in groups if group[MATRICES] for weight in group["params"]}
    names = [name for name, weight in model.named_parameters() if id(weight) in matrices]
    assert names and all(name.endswith((".weight", "_proj")) for name in names)


def test_roles_are_found_in_modules_of_any_model():
    class Rotary(nn.Module):
        def __init__(self):
            super().__init__()
            self.pos_proj = nn.Parameter(torch.ones(4, 4))
            self.layer_scale = nn.ParameterList([torch.ones(2, 4)])
            self.gate = nn.Linear(4, 1, bias=False)
            self.probe = nn.Parameter(torch.ones(3, 4))

    assert undecayed(Rotary()) == ["layer_scale.*", "probe"]
    assert undecayed(Rotary(), by_role=False) == []


@pytest.mark.heavy
def test_a_run_of_an_earlier_version_resumes_with_its_groups(tiny_recipe, tmp_path):
    config = {**TINY_LLAMA, "model_type": "gpt_oss", "head_dim": 8, "num_local_experts": 2}
    model = {"from_scratch": True, "config": {**config, "num_experts_per_tok": 1}}
    trainer = trainer_of(
        tiny_recipe, tmp_path, steps=2, model=model, checkpoints={"every_steps": 1}
    )
    trainer.train()
    checkpoint = trainer.run_folder / "checkpoint-1"
    content = unsealed((checkpoint / MANIFEST).read_bytes())
    assert content.pop("weight_decay") == "by role"
    (checkpoint / MANIFEST).write_text(sealed(content))
    resumed = trainer_of(tiny_recipe, tmp_path, steps=2, model=model)
    resumed.point = ResumePoint(checkpoint, read_manifest(checkpoint))
    groups = resumed.create_optimizer().param_groups
    assert [len(group["params"]) for group in groups] == [
        len(group["params"]) for group in parameter_groups(resumed.model, by_role=False)
    ]
    assert resumed.manifest("full").weight_decay == BY_DIMENSION
