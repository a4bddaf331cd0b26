"""The suite over a folder of the test's own."""

import pytest

from benchmarks.faults.runs import prepare
from benchmarks.faults.trials import Suite


@pytest.fixture
def suite(tmp_path):
    prepare(tmp_path / "work")
    return Suite(tmp_path / "work", repetitions=1, signals=1)
