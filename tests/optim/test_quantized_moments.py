import sys

import pytest
import torch

from cpt.errors import ResourceError
from cpt.optim.quantized_moments import BLOCK, code_of_zero, dequantize, quantize, require_bitsandbytes

pytest.importorskip("bitsandbytes")


@pytest.mark.parametrize("signed", [True, False])
def test_values_come_back_near_and_blocks_do_not_know_each_other(signed):
    values = torch.randn(3 * BLOCK + 7, generator=torch.Generator().manual_seed(1))
    values = values if signed else values.square()
    values[:BLOCK] *= 1e-6
    codes, largest = quantize(values, signed)
    assert codes.dtype == torch.uint8 and len(largest) == 4
    again = dequantize(codes, largest, signed)
    for block in range(4):
        place = slice(block * BLOCK, (block + 1) * BLOCK)
        assert (again[place] - values[place]).abs().max() < 0.05 * values[place].abs().max()
    first, its_largest = quantize(values[:BLOCK], signed)
    assert torch.equal(first, codes[:BLOCK]) and torch.equal(its_largest, largest[:1])


@pytest.mark.parametrize("signed", [True, False])
def test_the_code_of_zero_is_zero(signed):
    codes = torch.full((BLOCK,), code_of_zero(signed), dtype=torch.uint8)
    assert dequantize(codes, torch.ones(1), signed).eq(0).all()


def test_without_the_library_its_install_line_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes.functional", None)
    with pytest.raises(ResourceError, match=r"`optimizer.name`: adamw_8bit needs bitsandbytes.*pip install 'cpt\[bitsandbytes\]'"):
        require_bitsandbytes("`optimizer.name`: adamw_8bit")
