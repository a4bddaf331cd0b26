"""A tokenizer as a GGUF file holds it: tokens, their kinds, merges or scores, and the rule that splits text before
merging."""

import json
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from cpt.errors import CheckpointError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""llama.cpp's kinds of tokens."""

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {  # the rule as tokenizer.json has it -> llama.cpp's name for it, where merges are always followed
    "": "gpt-2",  # ByteLevel's own
    rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{REST}": "qwen2",
    rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{REST}": "dbrx",
    rf"[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{REST}": "ufakzeka",
}
IGNORING_MERGES = {"dbrx": "llama-bpe"}  # the same rule, where a word that is a token is not merged at all


@dataclass(frozen=True)
class Vocabulary:
    """What is written.

    Attributes:
        model: `gpt2` for bytes, `llama` for SentencePiece's characters.
        pre: the splitting rule.
        merges: of a byte-level vocabulary.
        scores: of a SentencePiece one: the sooner two pieces are merged, the higher that of the whole.
    """

    model: str
    pre: str
    tokens: list[str]
    kinds: list[int]
    merges: list[str]
    scores: list[float] | None
    adds_space: bool | None


def vocabulary_of(tokenizer: PreTrainedTokenizerBase, rows: int) -> Vocabulary:
    """A fast tokenizer's vocabulary, filled up to the model's rows of embeddings.

    Raises:
        CheckpointError: llama.cpp has no tokenizer of this kind.
    """
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    if content["model"]["type"] != "BPE":
        raise CheckpointError(
            f"--gguf writes tokenizers of byte pairs (BPE); this one is {content['model']['type']}. Use llama.cpp's"
            " convert_hf_to_gguf.py."
        )
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in content["model"]["merges"]]
    is_byte_level = '"ByteLevel"' in json.dumps(content["pre_tokenizer"])
    tokens, kinds = listed(content, rows, is_byte_level)
    if is_byte_level:
        return Vocabulary("gpt2", splitting_rule(content), tokens, kinds, merges, None, None)
    return Vocabulary("llama", "default", tokens, kinds, [], scores_of(tokens, merges), adds_space(content))


def listed(content: dict[str, Any], rows: int, is_byte_level: bool) -> tuple[list[str], list[int]]:
    """Each id's token and kind; rows that stand for no token are padding."""
    tokens = [f"[PAD{number}]" for number in range(rows)]
    kinds = [UNUSED] * rows
    for token, number in content["model"]["vocab"].items():
        is_byte = not is_byte_level and len(token) == 6 and token.startswith("<0x") and token.endswith(">")
        tokens[number], kinds[number] = token, BYTE if is_byte else NORMAL
    for added in content["added_tokens"]:
        tokens[added["id"]] = added["content"]
        kinds[added["id"]] = CONTROL if added["special"] else USER_DEFINED
    unknown = content["model"].get("unk_token")
    if unknown is not None and not is_byte_level:
        kinds[content["model"]["vocab"][unknown]] = UNKNOWN
    return tokens, kinds


def splitting_rule(content: dict[str, Any]) -> str:
    """llama.cpp's name for how a byte-level tokenizer splits text into words.

    Raises:
        CheckpointError: it knows no such rule.
    """
    outer = content["pre_tokenizer"]
    steps = outer["pretokenizers"] if outer["type"] == "Sequence" else [outer]
    splits = [step for step in steps if step["type"] != "ByteLevel"]
    levels = [step for step in steps if step["type"] == "ByteLevel"]
    plain = all(step["type"] == "Split" and step["behavior"] == "Isolated" and not step["invert"] for step in splits)
    if (
        plain
        and len(levels) == 1
        and not levels[0]["add_prefix_space"]
        and len(splits) == (0 if levels[0]["use_regex"] else 1)
    ):
        rule = splits[0]["pattern"].get("Regex", "?") if splits else ""
        if (name := SPLITS.get(rule)) is not None:
            return IGNORING_MERGES.get(name, "?") if content["model"].get("ignore_merges") else name
    raise CheckpointError(
        "llama.cpp has no name for the way in which this tokenizer splits text into words, so it would read other"
        " tokens. Those of GPT-2, Qwen2, Llama 3 and `cpt tokenizer train` have one; llama.cpp's convert_hf_to_gguf.py"
        " knows more."
    )


def scores_of(tokens: list[str], merges: list[str]) -> list[float]:
    """SentencePiece joins the pair whose whole has the highest score: so the first merge gets the highest."""
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        ranks.setdefault(merge.replace(" ", ""), rank)
    return [-float(ranks.get(token, len(merges))) for token in tokens]


def adds_space(content: dict[str, Any]) -> bool:
    """Whether a text gets a space in front, by the pre-tokenizer or, in older conversions, by the normalizer."""
    before = json.dumps([content["pre_tokenizer"], content["normalizer"]])
    return '"prepend_scheme": "first"' in before or '"prepend_scheme": "always"' in before or '"Prepend"' in before


def write_tokenizer(writer: Any, tokenizer: PreTrainedTokenizerBase, rows: int) -> str:
    """All that llama.cpp needs to read and write text.

    Returns:
        what was written, in words.
    """
    vocabulary = vocabulary_of(tokenizer, rows)
    writer.add_tokenizer_model(vocabulary.model)
    writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.kinds)
    if vocabulary.scores is not None:
        writer.add_token_scores(vocabulary.scores)
    else:
        writer.add_token_merges(vocabulary.merges)
    if vocabulary.adds_space is not None:
        writer.add_add_space_prefix(vocabulary.adds_space)
    plain, framed = (tokenizer("a", add_special_tokens=special)["input_ids"] for special in (False, True))
    writer.add_add_bos_token(len(framed) > len(plain) and framed[0] == tokenizer.bos_token_id)
    writer.add_add_eos_token(len(framed) > len(plain) and framed[-1] == tokenizer.eos_token_id)
    for add, number in (
        (writer.add_bos_token_id, tokenizer.bos_token_id),
        (writer.add_eos_token_id, tokenizer.eos_token_id),
        (writer.add_unk_token_id, tokenizer.unk_token_id),
        (writer.add_pad_token_id, tokenizer.pad_token_id),
    ):
        if number is not None:
            add(number)
    if isinstance(tokenizer.chat_template, str):
        writer.add_chat_template(tokenizer.chat_template)
    kind = "byte-level BPE" if vocabulary.model == "gpt2" else "SentencePiece's merges"
    return f"{kind}, {len(vocabulary.tokens):,} tokens, splitting rule `{vocabulary.pre}`"
