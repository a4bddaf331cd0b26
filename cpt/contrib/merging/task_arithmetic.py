"""The chat vector: after continued pre-training + (chat - base), weight by weight (arXiv 2310.04799), one tensor at a
time."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from cpt.checkpoints.model_folder import Tensors, write_tensors
from cpt.errors import CheckpointError
from cpt.export.export import copy_model_files, open_model, refuse_other_shapes, written_dtype
from cpt.export.older_readers import rewrite_json
from cpt.export.trained import saved_config
from cpt.models.families import FAMILIES
from cpt.models.inventory import build_on_meta
from cpt.tokenizer.load import from_folder_or_hub


@dataclass(frozen=True)
class InputModel:
    tensors: Tensors
    config: PreTrainedConfig
    tokenizer: PreTrainedTokenizerBase


def write_chat_vector(
    after: Path, base: Path, chat: Path, output: Path, *, scale: float, dtype: torch.dtype | None
) -> list[str]:
    """Write after + scale * (chat - base), with the chat model's template, special tokens and generation config.

    A token that only `after` has (from a vocabulary extension) keeps its row; one that only `chat` has is added with
    its row. The sum is computed in fp32 and written in `dtype`, by default that of `after`. Returns lines about the
    vocabularies.

    Raises:
        CheckpointError: the three models differ in architecture or tokenizer.
    """
    trained = open_source(after)
    origin = open_source(base)
    speaker = open_source(chat)
    names = vocabulary_tensors(trained.config, trained.tensors.files)
    for other in (origin, speaker):
        refuse_other_shapes(trained.tensors, other.tensors, apart_from=sorted(names))
    counts = [part.tensors.shapes[min(names)][0] for part in (trained, origin, speaker)]
    rows = match_rows(trained.tokenizer, origin.tokenizer, speaker.tokenizer, counts)

    def merged(name: str) -> torch.Tensor:
        trained_weight = trained.tensors.read(name)
        origin_weight = origin.tensors.read(name)
        chat_weight = speaker.tensors.read(name)
        if not trained_weight.dtype.is_floating_point:
            return trained_weight
        if name in names:
            return merge_rows(rows, trained_weight, origin_weight, chat_weight, scale)
        return trained_weight.float() + scale * (chat_weight.float() - origin_weight.float())

    shapes = {}
    for weight_name, shape in trained.tensors.shapes.items():
        if weight_name in names:
            shape = (rows.total, *shape[1:])
        shapes[weight_name] = (shape, written_dtype(trained.tensors, weight_name, dtype))
    output.mkdir(parents=True, exist_ok=True)
    write_tensors(output, shapes, merged)
    copy_model_files(after, output)
    chat_tokens = {number: token for token, number in speaker.tokenizer.get_vocab().items()}
    tokenizer = add_tokens(trained.tokenizer, speaker.tokenizer, rows)
    tokenizer.save_pretrained(output)
    write_configs(output, speaker, chat_tokens, tokenizer.get_vocab(), rows.total)
    if rows.added:
        names_added = f" ({', '.join(rows.added[:4])}{', ...' if rows.added[4:] else ''})"
    else:
        names_added = ""
    unchanged = f"tokens of {after} with unchanged rows: {rows.kept:,}"
    return [f"Tokens added from {chat}: {len(rows.added):,}{names_added}; {unchanged}."]


def open_source(folder: Path) -> InputModel:
    tensors = open_model(folder)
    config = saved_config(folder)
    if config.model_type in FAMILIES:
        raise CheckpointError(
            f"{folder} is a `{config.model_type}`. Export it first: cpt export {folder} -o FOLDER"
        )
    return InputModel(tensors, config, from_folder_or_hub(str(folder), None, False))


def write_configs(
    output: Path, chat: InputModel, chat_tokens: dict[int, str], ids: dict[str, int], rows: int
) -> None:
    """The trained model's shape, and the chat model's special tokens and sampling, in ids of the merged vocabulary."""

    def new_id(old: Any) -> Any:
        if isinstance(old, list):
            return [ids[chat_tokens[token]] for token in old if token in chat_tokens]
        return (
            ids[chat_tokens[old]] if old in chat_tokens else None
        )  # some configs pad with -1, not a token

    def translated(values: dict[str, Any]) -> dict[str, Any]:
        return {
            key: new_id(values.get(key)) for key in ("bos_token_id", "eos_token_id", "pad_token_id")
        }

    changes = {"vocab_size": rows} | translated(chat.config.to_dict())
    rewrite_json(output / "config.json", lambda config: config | changes)
    theirs = chat.tensors.folder / "generation_config.json"
    if theirs.is_file():
        generation = json.loads(theirs.read_text())
        (output / theirs.name).write_text(
            json.dumps(generation | translated(generation), indent=2) + "\n"
        )


@dataclass(frozen=True)
class SharedRowIds:
    total: int
    shared: torch.Tensor  # [n] rows, in the trained model, of tokens in all three models
    in_base: torch.Tensor  # [n] their rows in the base
    in_chat: torch.Tensor  # [n] their rows in the chat model
    added: list[str]  # tokens only in the chat model, appended to those of the trained model
    first_added: int
    added_in_chat: torch.Tensor
    kept: int  # tokens of the trained model that another model lacks; their rows are unchanged


def match_rows(
    after: PreTrainedTokenizerBase,
    base: PreTrainedTokenizerBase,
    chat: PreTrainedTokenizerBase,
    rows: Sequence[int],
) -> SharedRowIds:
    """Match token ids; those of `after` are kept. CheckpointError for tokenizers of different origin."""
    vocabularies = after_ids, base_ids, chat_ids = (
        after.get_vocab(),
        base.get_vocab(),
        chat.get_vocab(),
    )
    for ids, count, option in zip(vocabularies, rows, ("--after", "--base", "--chat"), strict=True):
        needed = max(ids.values()) + 1
        if needed > count:
            raise CheckpointError(
                f"{option} has {needed:,} tokens, but {count:,} rows. Copy its tokenizer there."
            )
    if after_ids == base_ids == chat_ids and len(set(rows)) == 1:
        every = torch.arange(rows[0])
        return SharedRowIds(rows[0], every, every, every, [], rows[0], every[:0], kept=0)
    # Each must have every token of the base, and only added tokens can be added to a tokenizer.
    learned = base_ids.keys() - base.added_tokens_encoder.keys()
    for ids, option in ((after_ids, "--after"), (chat_ids, "--chat")):
        lacking = learned - ids.keys()
        if lacking:
            missing = (
                f"{len(lacking):,} of the {len(learned):,} tokens of --base ({shown(lacking)})"
            )
            raise CheckpointError(
                f"the tokenizer of {option} lacks {missing}. All three models must share one base."
            )
    tokens_of_chat = chat_ids.keys() - after_ids.keys() - chat.added_tokens_encoder.keys()
    if tokens_of_chat:
        pieces = f"{len(tokens_of_chat):,} vocabulary entries ({shown(tokens_of_chat)}) that --after lacks"
        raise CheckpointError(
            f"the tokenizer of --chat has {pieces}. Use a chat model with the base's tokenizer."
        )
    shared = [token for token in after_ids if token in base_ids and token in chat_ids]
    added = sorted(
        (token for token in chat_ids if token not in after_ids), key=lambda token: chat_ids[token]
    )
    first_added = max(after_ids.values()) + 1
    return SharedRowIds(
        total=max(rows[0], first_added + len(added)),
        shared=torch.tensor([after_ids[token] for token in shared]),
        in_base=torch.tensor([base_ids[token] for token in shared]),
        in_chat=torch.tensor([chat_ids[token] for token in shared]),
        added=added,
        first_added=first_added,
        added_in_chat=torch.tensor([chat_ids[token] for token in added], dtype=torch.long),
        kept=len(after_ids) - len(shared),
    )


def shown(tokens: Iterable[str]) -> str:
    return ", ".join(map(repr, sorted(tokens)[:4]))


def merge_rows(
    rows: SharedRowIds, after: torch.Tensor, base: torch.Tensor, chat: torch.Tensor, scale: float
) -> torch.Tensor:
    """after + scale * (chat - base) in fp32 for tokens of all three; tokens of only one keep their row."""
    merged = torch.zeros(rows.total, *after.shape[1:])
    merged[: after.shape[0]] = after
    merged[rows.shared] += scale * (chat[rows.in_chat].float() - base[rows.in_base].float())
    merged[rows.first_added : rows.first_added + len(rows.added)] = chat[rows.added_in_chat].float()
    return merged


def add_tokens(
    after: PreTrainedTokenizerBase, chat: PreTrainedTokenizerBase, rows: SharedRowIds
) -> PreTrainedTokenizerBase:
    """The trained model's tokenizer plus the chat model's tokens, special tokens and template."""
    by_name = {str(token): token for token in chat.added_tokens_decoder.values()}
    after.add_tokens([by_name[token] for token in rows.added])
    ids = after.get_vocab()
    misplaced = []
    for number, added_token in enumerate(rows.added):
        if ids[added_token] != rows.first_added + number:
            misplaced.append(added_token)
    if misplaced:
        raise CheckpointError(
            f"--after's tokenizer has gaps in its ids, at {shown(misplaced)}. Use another."
        )
    after.chat_template = chat.chat_template
    for name in ("bos_token", "eos_token", "pad_token"):
        token = getattr(chat, name)
        if token is not None:
            setattr(after, name, token)
    return after


def vocabulary_tensors(config: PreTrainedConfig, stored: Iterable[str]) -> set[str]:
    """Stored names of the tensors with one row per token: embeddings and head."""
    model = build_on_meta(config)
    parts = []
    for part in (model.get_input_embeddings(), model.get_output_embeddings()):
        if part is not None:
            parts.append(part)
    ours = set[int]()
    for part in parts:
        ours.update(map(id, part.parameters()))
    names = []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in ours:
            names.append(name)
    tensors = set()
    for stored_name in stored:
        for name in names:
            if name == stored_name or name.endswith(f".{stored_name}"):
                tensors.add(stored_name)
    return tensors
