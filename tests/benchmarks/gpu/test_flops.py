"""The formulas, by hand."""

import pytest

from benchmarks.gpu.cases import CASES, REACHED_BY_MATRICES
from benchmarks.gpu.flops import seen_by_each, strict

A = 6 * (12 * 12 * 768**2 + 50_304 * 768) + 6 * 12 * 768 * 1024
B = 6 * (24 * (2 * 896 * 896 + 2 * 896 * 128 + 3 * 896 * 4864) + 151_936 * 896) + 6 * 24 * 896 * 4096
C = 6 * (16 * (2 * 2048 * 2048 + 2 * 2048 * 512 + 3 * 2048 * 8192) + 128_256 * 2048) + 6 * 16 * 2048 * 4096


@pytest.mark.parametrize(("case", "operations", "wall"), [("A", A, 990e3), ("B", B, 226e3), ("C", C, 96e3)])
def test_strict_operations_of_a_token(case, operations, wall):
    found = strict(CASES[case].config, CASES[case].tokens)
    assert found == operations
    assert REACHED_BY_MATRICES / found == pytest.approx(wall, rel=0.005), (
        "tokens a second at 790 TFLOP/s, as published"
    )


def test_packed_rows_see_their_document_alone():
    assert seen_by_each([1, 3]) == 2.5 and seen_by_each([4096, 4096]) == 4096
    assert strict(CASES["D"].config, 1000.0) == strict(CASES["C"].config, 1000.0) < C
