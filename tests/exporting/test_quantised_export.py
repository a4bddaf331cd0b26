"""The whole of `cpt export --quantize`; what quantising does to a model: test_quantised.py."""

import json

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer
from typed_export import export

from cpt.checkpoints.model_folder import weight_files
from cpt.exporting.quantised_export import copy_beside
from cpt.exporting.sealed import refuse_unsealed


def test_all_but_the_weights_is_copied_beside_a_quantised_model(base_folder, tmp_path):
    whole = tmp_path / "whole"
    AutoModelForCausalLM.from_pretrained(base_folder).save_pretrained(whole, max_shard_size="50KB")
    AutoTokenizer.from_pretrained(base_folder).save_pretrained(whole)
    assert len(weight_files(whole)) > 1
    copy_beside(whole, tmp_path / "quantised")
    left_out = {file.name for file in whole.iterdir()} - {file.name for file in (tmp_path / "quantised").iterdir()}
    assert left_out == {"model.safetensors.index.json", *(file.name for file in weight_files(whole))}


@pytest.mark.quantized
def test_a_quantised_export_is_one_that_strangers_load_with_its_cost_on_the_card(base_folder, tmp_path):
    told = export(base_folder, "-o", tmp_path / "out", "--quantize", "int8", "--max-rise", "1")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "What int8 costs" in told and "## Quantised" in card and "What int8 costs" in card and "# out\n" in card
    assert (
        json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["quant_method"] == "torchao"
    )
    assert refuse_unsealed(tmp_path / "out") and {path.name for path in tmp_path.iterdir()} == {"out"}
