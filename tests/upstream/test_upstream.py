"""transformers' own common tests of models pass on our families: `make test-upstream`, which fetches them first."""

import importlib
import sys
import types
import unittest

import pytest
import torch
from tiny_models import tiny_config
from transformers import set_seed
from upstream.fetch import PACKAGE, UPSTREAM

from cpt.models.config import config_from
from cpt.models.families import FAMILIES
from cpt.models.minimind import MiniMind2MoEModel

pytestmark = pytest.mark.slow
if not (UPSTREAM / PACKAGE).is_dir():
    pytest.skip("transformers' tests are not here; make test-upstream fetches them", allow_module_level=True)
sys.path[:0] = [str(UPSTREAM), str(UPSTREAM / "packages")]


def tester(module: str, name: str) -> type:
    """A class of transformers' tests; an empty one where the source distribution lacks its file."""
    if not (UPSTREAM / PACKAGE / f"{module.replace('.', '/')}.py").is_file():
        standing_in = types.ModuleType(f"{PACKAGE}.{module}")
        vars(standing_in)[name] = type(name, (), {})
        sys.modules[standing_in.__name__] = standing_in
    found: type = vars(importlib.import_module(f"{PACKAGE}.{module}"))[name]
    return found


tester("exporters.test_export", "ExportTesterMixin")
GenerationTesterMixin = tester("generation.test_utils", "GenerationTesterMixin")
ModelTesterMixin = tester("test_modeling_common", "ModelTesterMixin")

SKIPPED: dict[str, dict[str, str]] = {}


class TinyModel:
    """What the testers ask of a model's own tester."""

    batch_size, seq_length, is_training, num_hidden_layers, num_attention_heads, hidden_size = 3, 7, True, 2, 4, 32

    def __init__(self, family: str) -> None:
        self.family = family

    def get_config(self):
        return config_from(tiny_config(self.family, pad_token_id=0))

    def prepare_config_and_inputs_for_common(self):
        config = self.get_config()
        ids = torch.randint(3, 96, (self.batch_size, self.seq_length))
        return config, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


class Common(ModelTesterMixin, GenerationTesterMixin):
    family = ""

    def setUp(self) -> None:
        set_seed(0)
        self.model_tester = TinyModel(self.family)
        if reason := (SKIPPED.get("", {}) | SKIPPED.get(self.family, {})).get(self._testMethodName):
            self.skipTest(reason)


for family, parts in FAMILIES.items():
    classes = (MiniMind2MoEModel, parts.model) if family == "minimind2_moe" else (parts.model,)
    name = f"Test{parts.model.__name__}"
    globals()[name] = type(
        name, (Common, unittest.TestCase), {"family": family, "all_model_classes": classes, "__module__": __name__}
    )
