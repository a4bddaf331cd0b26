"""A phase in which only the rows of new tokens learn leaves every other number of the model as it was, bit for bit."""

import pytest
import torch
from launching import launch_to_its_end, zero_profile
from safetensors.torch import load_file, save_file
from tiny import write_recipe
from tiny_extended import extend, new_rows_recipe, new_tokens, write_model


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def extended(request, corpus, tokenizer_folder, tmp_path):
    model = write_model(tmp_path / "model", tokenizer_folder, tied=request.param)
    assert extend(model, corpus / "domain.jsonl", tmp_path / "extended") == 0
    return tmp_path / "extended"


def assert_only_new_rows_changed(extended, final):
    before, after = (load_file(folder / "model.safetensors") for folder in (extended, final))
    assert before.keys() == after.keys()
    new = new_tokens(extended)
    for name in before:
        same = (before[name] == after[name]).reshape(len(before[name]), -1).all(1)
        if "embed_tokens" in name or "lm_head" in name:
            assert set(torch.nonzero(~same).flatten().tolist()) <= set(new), name
            assert (~same).sum() >= 4, name
        else:
            assert same.all(), name


@pytest.mark.long
@pytest.mark.parametrize(("stage", "offload", "bf16"), [(0, False, True), (2, True, False), (3, True, True)])
def test_only_the_new_rows_change_on_two_processes_and_sharded(extended, tiny_recipe, tmp_path, stage, offload, bf16):
    sections = new_rows_recipe(tiny_recipe, extended)
    sections["training"] |= {"bf16": bf16, "max_grad_norm": 0.5}
    if stage:
        sections["training"]["deepspeed"] = zero_profile(tmp_path, stage, offload=offload)
    launch_to_its_end(write_recipe(sections, tmp_path / "r.yaml"), processes=2)
    if stage and bf16:  # DeepSpeed keeps such weights in bfloat16: what was read into it is what must stay
        rounded = {name: tensor.bfloat16() for name, tensor in load_file(extended / "model.safetensors").items()}
        save_file(rounded, extended / "model.safetensors")
    assert_only_new_rows_changed(extended, tmp_path / "runs" / "tiny" / "final")
