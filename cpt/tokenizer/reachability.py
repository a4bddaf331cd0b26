"""Which tokens a text can be encoded to, found by encoding texts that hold them."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tokenizers import Tokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

# Some tokens only come out with something around their text (@).
AROUND = ("@", " @", "a@", "(@", "\n@", "@a", "a@a", " @ a", "1@", "@\n", ".@.")
NEVER_IN_UTF8 = re.compile(rb"[\xc0\xc1\xf5-\xff]")
REPLACEMENT = "\ufffd"
BYTE_OF_SIGN = {sign: byte for byte, sign in bytes_to_unicode().items()}  # GPT-2 writes bytes as printable signs
NO_UTF8 = "has bytes that no UTF-8 text has"
OTHER_TOKENS = "its own string becomes other tokens"
NOT_FOUND = "not found in any text that was tried"


@dataclass(frozen=True)
class UnreachableTokens:
    """A token that no text was found to give, and why."""

    id: int
    token: str
    why: str


def is_reached(backend: Tokenizer, number: int, *examples: str) -> bool:
    """True if the token comes out of its own text, that text with something around it, or one of the examples.

    A part of a character has no text of its own: there the merges alone are asked.
    """
    text = backend.decode([number], skip_special_tokens=False)
    if REPLACEMENT in text:
        return [one.id for one in backend.model.tokenize(backend.id_to_token(number) or "")] == [number]
    return any(
        number in encode(backend, one) for one in (*(around.replace("@", text) for around in AROUND), *examples)
    )


def encode(backend: Tokenizer, text: str) -> list[int]:
    """The ids of a text alone."""
    ids: list[int] = backend.encode(text, add_special_tokens=False).ids
    return ids


def unreachable_tokens(backend: Tokenizer, seen: Mapping[int, int]) -> Iterator[UnreachableTokens]:
    """Tokens of the vocabulary, special and added ones aside, that no text gives.

    NO_UTF8 and OTHER_TOKENS are proofs: a token of a byte-pair encoding that stands anywhere in a text is also what
    the merges make of its own string, since none of them crossed its borders. NOT_FOUND is none: its text was tried
    alone and inside others.

    Args:
        seen: id -> how often it stands in texts that were encoded; more than never is reached.
    """
    content = json.loads(backend.to_str())
    is_bpe, is_byte_level = content["model"]["type"] == "BPE", '"ByteLevel"' in json.dumps(content["pre_tokenizer"])
    added = {token["id"] for token in content["added_tokens"]}
    for token, number in sorted(backend.get_vocab(with_added_tokens=False).items(), key=lambda item: item[1]):
        if number in added or seen.get(number):
            continue
        if is_byte_level and NEVER_IN_UTF8.search(bytes_of(token)):
            yield UnreachableTokens(number, token, NO_UTF8)
        elif is_bpe and [one.id for one in backend.model.tokenize(token)] != [number]:
            yield UnreachableTokens(number, token, OTHER_TOKENS)
        elif not is_reached(backend, number):
            yield UnreachableTokens(number, token, NOT_FOUND)


def bytes_of(token: str) -> bytes:
    """The bytes that a byte-level token stands for."""
    return bytes(BYTE_OF_SIGN[sign] for sign in token if sign in BYTE_OF_SIGN)
