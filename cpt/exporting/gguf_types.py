"""How each tensor of a GGUF file is stored: the type that the user chose, and what stays more exact whatever the
choice."""

from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from cpt.errors import ResourceError

GgufType = Literal["f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0"]
UNQUANTISED = ("f32", "f16", "bf16")
BLOCK = 32  # numbers of one row that share a scale
ALWAYS_F32 = ("_norm.weight", "position_embd.weight", "ffn_gate_inp.weight", "rope_freqs.weight", ".bias")
"""Norms, positions, routers and biases: llama.cpp computes with them in fp32."""
IN_AND_OUT = ("token_embd.weight", "output.weight")
"""Their errors reach every token directly: of a 4 or 5 bit file they have 8 bits."""


def check_gguf() -> None:
    """Whether files can be written.

    Raises:
        ResourceError: the package is missing.
    """
    try:
        import gguf  # noqa: F401
    except ImportError as problem:
        raise ResourceError(
            "--gguf needs llama.cpp's own package for the format: pip install 'cpt[gguf]'"
        ) from problem


def type_of(name: str, shape: tuple[int, ...], wanted: GgufType) -> str:
    """The type that a tensor of this GGUF name and shape gets."""
    if len(shape) < 2 or name.endswith(ALWAYS_F32):
        return "f32"
    if wanted in UNQUANTISED:
        return wanted
    if shape[-1] % BLOCK:
        return "f16"  # what llama.cpp's own converter does with such rows
    return "q8_0" if name in IN_AND_OUT else wanted


def encode(tensor: torch.Tensor, kind: str) -> tuple[NDArray[Any], Any]:
    """A tensor's numbers as a file holds them, and gguf's name for the type."""
    import gguf

    numbers = tensor.detach().to(torch.float32).contiguous().numpy()
    quantisation = gguf.GGMLQuantizationType[kind.upper()]
    if kind == "f32":
        return numbers, quantisation
    if kind == "f16":
        return numbers.astype(np.float16), quantisation
    return gguf.quantize(numbers, quantisation), quantisation


def decode(data: NDArray[Any], quantisation: Any, shape: tuple[int, ...]) -> torch.Tensor:
    """The numbers that a reader gets back, in fp32."""
    import gguf

    return torch.from_numpy(np.asarray(gguf.dequantize(data, quantisation), dtype=np.float32).reshape(shape).copy())


def file_type(wanted: GgufType) -> int:
    """llama.cpp's number for a file most of whose tensors have this type."""
    import gguf

    return int(gguf.LlamaFileType.ALL_F32 if wanted == "f32" else gguf.LlamaFileType[f"MOSTLY_{wanted.upper()}"])
