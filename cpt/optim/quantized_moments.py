"""Moments of an optimizer in blocks of 8-bit numbers, by bitsandbytes (arXiv 2110.02861)."""

from functools import cache

import torch

from cpt.errors import ResourceError

BLOCK = 256


def require_bitsandbytes(what: str) -> None:
    """See that the library is there.

    Raises:
        ResourceError: it is not, with how to install it.
    """
    try:
        import bitsandbytes.functional  # type: ignore[import-not-found, unused-ignore]  # noqa: F401 - an extra
    except ImportError as problem:
        raise ResourceError(f"{what} needs bitsandbytes. Install it: pip install 'cpt[bitsandbytes]'") from problem


@cache
def code_book(signed: bool, device: torch.device) -> torch.Tensor:
    """The 256 values that a code stands for, as shares of the largest in its block."""
    from bitsandbytes.functional import create_dynamic_map

    book: torch.Tensor = create_dynamic_map(signed=signed).to(device)
    return book


@cache
def code_of_zero(signed: bool) -> int:
    """The one that stands for 0."""
    return int((code_book(signed, torch.device("cpu")) == 0).nonzero()[0])


def quantize(moment: torch.Tensor, signed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes, and the largest value of each block."""
    codes, largest = torch.ops.bitsandbytes.quantize_blockwise(moment, code_book(signed, moment.device), BLOCK)
    return codes, largest


def dequantize(codes: torch.Tensor, largest: torch.Tensor, signed: bool) -> torch.Tensor:
    """In fp32."""
    values: torch.Tensor = torch.ops.bitsandbytes.dequantize_blockwise(
        codes, largest, code_book(signed, codes.device), BLOCK, torch.float32
    )
    return values
