import subprocess
import sys

import pytest

from cpt.models.rules import check_model_section
from cpt.recipe.schema import Model

HASH = "0" * 40


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ({}, "model.path is missing"),
        ({"from_scratch": True}, "model.config is missing"),
        ({"from_scratch": True, "config": {"hidden_size": 8}}, "model.config.model_type is missing"),
        ({"path": "some/model", "trust_remote_code": True}, "40 hex digits"),
        ({"path": "some/model", "trust_remote_code": True, "revision": "main"}, "40 hex digits"),
        ({"path": "nvidia/nemotron-3-8b-base-4k"}, "Use nvidia/Minitron-8B-Base"),
        ({"path": "nvidia/Nemotron-3-8B-Chat-4k-SFT"}, "Use nvidia/Minitron-8B-Base"),
        (
            {"from_scratch": True, "config": {"model_type": "llama"}, "revision": "main"},
            "model.revision has no effect",
        ),
        (
            {"from_scratch": True, "config": {"model_type": "llama"}, "hashes": {"a": "b" * 64}},
            "model.hashes has no effect",
        ),
        ({"path": "some/model", "hashes": {"a": "xyz"}}, "not a sha256"),
    ],
)
def test_a_mistake_of_the_section_is_named_with_its_remedy(section: dict, says: str):
    assert any(says in problem for problem in check_model_section(Model.model_validate(section)))


@pytest.mark.parametrize(
    "section",
    [
        {"path": "Qwen/Qwen2.5-1.5B"},
        {"path": "some/model", "trust_remote_code": True, "revision": HASH},
        {"from_scratch": True, "config": {"model_type": "llama"}},
        {"path": "meta-llama/Llama-2-7b-hf", "from_scratch": True, "config": {"model_type": "llama"}},
    ],
)
def test_a_right_section_has_no_mistakes(section: dict):
    assert check_model_section(Model.model_validate(section)) == []


def test_the_rules_need_no_torch():
    code = "import sys, cpt.models.rules; print('torch' in sys.modules, 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split() == [
        "False",
        "False",
    ]
