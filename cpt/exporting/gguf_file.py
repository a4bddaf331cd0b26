"""Write a model of transformers as one GGUF file, and put into the model what the file holds."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cpt.errors import CheckpointError
from cpt.exporting.gguf_families import Family
from cpt.exporting.gguf_tokenizer import write_tokenizer
from cpt.exporting.gguf_types import GgufType, decode, encode, file_type, type_of
from cpt.models.inventory import vocabulary_size


def write_gguf(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, family: Family, file: Path, kind: GgufType, name: str
) -> str:
    """One file with all of a model; afterwards the model computes with the numbers that the file holds.

    Returns:
        what the tokenizer was written as.

    Raises:
        CheckpointError: llama.cpp has no place for some of it, or the disk does not take it.
    """
    import gguf

    arch = next(number for number, known in gguf.MODEL_ARCH_NAMES.items() if known == family.arch)
    names = gguf.get_tensor_name_map(arch, model.config.num_hidden_layers)
    writer = gguf.GGUFWriter(str(file), family.arch)
    writer.add_type("model")
    writer.add_name(name)
    family.metadata(writer, model.config)
    writer.add_file_type(file_type(kind))
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    told = write_tokenizer(writer, tokenizer, vocabulary_size(model.config))
    for tensor_name, tensor in own_tensors(model):
        for part_name, part in family.tensor(tensor_name, tensor, model.config):
            written_as = gguf_name(names, part_name)
            stored_as = type_of(written_as, tuple(part.shape), kind)
            data, quantisation = encode(part, stored_as)
            writer.add_tensor(written_as, data, raw_dtype=quantisation)
            put_back(tensor, part, stored_as)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    except OSError as failure:  # numpy tells only how much of it the disk took
        raise CheckpointError(f"{file.name} could not be written: {failure}. Is the disk full?") from failure
    return told


def own_tensors(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Each parameter once: a head that is the embedding is left out, and readers take the embedding for it."""
    yield from ((name, parameter.detach()) for name, parameter in model.named_parameters())


def gguf_name(names: Any, name: str) -> str:
    """llama.cpp's name of a tensor.

    Raises:
        CheckpointError: it has none, so that the model would be incomplete there.
    """
    found = names.get_name(name, try_suffixes=(".weight", ".bias"))
    if found is None:
        raise CheckpointError(f"GGUF has no name for the tensor {name}, so llama.cpp cannot load this model.")
    return str(found)


def put_back(tensor: torch.Tensor, part: torch.Tensor, stored_as: str) -> None:
    """Give a parameter, or a part of it that is a view, the numbers that readers will get.

    A part that is a copy has its rows in another order, or is stored exactly; and each row is rounded by itself. So
    rounding the parameter as it lies comes to the same.
    """
    own = part if part.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr() else tensor
    data, quantisation = encode(own, stored_as)
    own.copy_(decode(data, quantisation, tuple(own.shape)))
