"""Markers of transformers' tests, which pytest would refuse."""

import pytest

MARKERS = (
    "accelerate_tests",
    "flash_attn_test",
    "flash_attn_3_test",
    "flash_attn_4_test",
    "torch_compile_test",
)
MARKERS += ("torch_export_test", "generate", "order", "is_training_test")


def pytest_pycollect_makemodule(module_path, parent: pytest.Collector) -> None:
    for name in MARKERS:
        parent.config.addinivalue_line("markers", f"{name}: of transformers' tests")
