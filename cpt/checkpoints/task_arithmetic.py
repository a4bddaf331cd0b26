"""The chat vector: after continued pre-training + (chat - base), weight by weight (arXiv 2310.04799), read tensor by
tensor."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig, PreTrainedTokenizerBase

from cpt.checkpoints.average import copy_beside, open_model, refuse_other_shapes, written_dtype
from cpt.checkpoints.model_folder import Tensors, write_tensors
from cpt.checkpoints.vocabularies import add_tokens, match_rows, merge_rows, vocabulary_tensors
from cpt.errors import CheckpointError
from cpt.models.families.register import FAMILIES, register_families
from cpt.tokenizer.load import from_folder_or_hub

TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True)
class Part:
    tensors: Tensors
    config: PreTrainedConfig
    tokenizer: PreTrainedTokenizerBase


def write_chat_vector(
    after: Path, base: Path, chat: Path, output: Path, *, scale: float, dtype: torch.dtype | None, max_shard_size: str
) -> list[str]:
    """Write after + scale * (chat - base), with the chat model's template, special tokens and generation config.

    A token that only `after` knows (learned by a vocabulary extension) keeps its row; one that only `chat` knows is
    added with its row.

    Args:
        dtype: of the written numbers; None: as `after` has them. The sum is made in fp32.

    Returns:
        What there is to tell of the vocabularies.

    Raises:
        CheckpointError: the three are not models of one architecture and tokenizer.
    """
    trained, origin, speaker = open_part(after), open_part(base), open_part(chat)
    names = vocabulary_tensors(trained.config, trained.tensors.files)
    for other in (origin, speaker):
        refuse_other_shapes(trained.tensors, other.tensors, apart_from=sorted(names))
    counts = tuple(next(part.tensors.shapes[name][0] for name in sorted(names)) for part in (trained, origin, speaker))
    rows = match_rows(trained.tokenizer, origin.tokenizer, speaker.tokenizer, (counts[0], counts[1], counts[2]))

    def merged(name: str) -> torch.Tensor:
        one, two, three = (part.tensors.read(name) for part in (trained, origin, speaker))
        if not one.dtype.is_floating_point:
            return one
        if name in names:
            return merge_rows(rows, one, two, three, scale)
        return one.float() + scale * (three.float() - two.float())

    shapes = {
        name: ((rows.total, *shape[1:]) if name in names else shape, written_dtype(trained.tensors, name, dtype))
        for name, shape in trained.tensors.shapes.items()
    }
    output.mkdir(parents=True, exist_ok=True)
    write_tensors(output, shapes, merged, max_shard_size)
    copy_beside(after, output)
    speaker_tokens = {number: token for token, number in speaker.tokenizer.get_vocab().items()}
    tokenizer = add_tokens(trained.tokenizer, speaker.tokenizer, rows)
    tokenizer.save_pretrained(output)
    write_configs(output, speaker, speaker_tokens, tokenizer.get_vocab(), rows.total)
    names_added = f" ({', '.join(rows.added[:4])}{', ...' if rows.added[4:] else ''})" if rows.added else ""
    return [
        f"Tokens added from {chat}: {len(rows.added):,}{names_added}; tokens of {after} that keep their rows as"
        f" trained: {rows.kept:,}."
    ]


def open_part(folder: Path) -> Part:
    """A model with its config and tokenizer.

    Raises:
        CheckpointError: it is none, or one that only this package reads.
    """
    tensors = open_model(folder)
    register_families()
    config = AutoConfig.from_pretrained(folder)
    if config.model_type in FAMILIES:
        raise CheckpointError(
            f"{folder} is a checkpoint of `{config.model_type}`. Export it first: cpt export {folder} --output FOLDER"
        )
    return Part(tensors, config, from_folder_or_hub(str(folder), None, False))


def write_configs(output: Path, chat: Part, chat_tokens: dict[int, str], ids: dict[str, int], rows: int) -> None:
    """The trained model's shape, and the chat model's way to begin, end and sample, in the merged vocabulary's ids."""

    def translated(values: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key in TOKEN_IDS:
            given = values.get(key)
            known = [
                ids[chat_tokens[one]] for one in (given if isinstance(given, list) else [given]) if one in chat_tokens
            ]
            found[key] = (
                known if isinstance(given, list) else next(iter(known), None)
            )  # some configs pad with -1, which is no token
        return found

    path = output / "config.json"
    config = json.loads(path.read_text()) | {"vocab_size": rows}
    path.write_text(json.dumps(config | translated(chat.config.to_dict()), indent=2, sort_keys=True) + "\n")
    theirs = chat.tensors.folder / "generation_config.json"
    if theirs.is_file():
        generation = json.loads(theirs.read_text())
        (output / theirs.name).write_text(json.dumps(generation | translated(generation), indent=2) + "\n")
