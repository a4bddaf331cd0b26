"""gigatoken, many times faster than Hugging Face's tokenizers, where it is seen to give the same ids.

It is young and does not honour every tokenizer's rules, so it is believed only after a proof: documents of the run
itself and hard strings are encoded with both. It never gets the user's files, only texts that were read and checked
(its own readers stop at a bad row in silence).
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from importlib import metadata
from typing import Any

import numpy as np
from numpy.typing import NDArray

Lengths = NDArray[np.int64]
Flat = tuple[NDArray[Any], Lengths]  # all ids, one text after the other, and how many each text has
Encode = Callable[[Sequence[str]], Flat]
PIECE = 50_000  # characters of a text in the proof: Hugging Face's encoder is what takes time there

HARD_STRINGS = [
    "",
    " ",
    "  ",
    "\n",
    "\n\n \n",
    "\r\n\r\n",
    "\t\t x\t",
    " " * 300 + "x" + " " * 299,
    "\n" * 200,
    "a \n b  \n\n   c\u00a0\u2003\u3000d\u200be\ufeff",
    "don't DON'T I'LL we've 'S 'tis it\u2019s",
    "1 12 123 1234 12345 3.14159 1,000,000 0x1F 1e-4 \u0663\u0664 \u2167 \u00bd \u00b2",
    "def f(x):\n    return {'a': [x ** 2, ...]}  # !=\n\n\n\tpass",
    "https://example.org/a_b-c?d=e&f=%20#g user@example.org C:\\dir\\file",
    "!?!?...---___***///\\\\\\ <<>> ((([[[{{{",
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002\u3053\u3093\u306b\u3061\u306f \uc548\ub155\ud558\uc138\uc694",
    (
        "\u0645\u0631\u062d\u0628\u0627 \u05e9\u05dc\u05d5\u05dd \u0928\u092e\u0938\u094d\u0924\u0947"
        " \u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35"
    ),
    "e\u0301 \u00e9 n\u0303 \u1e9b\u0323 \ufb01 \uff21\uff11 \u212b \u0130i\u0307 \u1e9e",
    "a\u0300\u0301\u0302\u0303\u0304 \u0300 \u20dd",
    (
        "\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea \U0001f44d\U0001f3fd \u2764\ufe0f"
        " \U000e0041"
    ),
    "\x01\x02\x1b[0m\x7f\x80\x9f\u2028\u2029\u0085\x0b\x0c\x1c",
    "\ufffd\uffff\U0010ffff\ue000\U000f0000",
    "x" * 5000,
    "ab" * 3000,
    "Stra\u00dfe \u0391\u03a3\u03a3 \u01c5 na\u00efve \u0141\u00f3d\u017a",
    "\\u0041 &amp; <p>text</p> $x^2_{i}$ |a|b|",
    "A1b2C3 camelCaseString snake_case_string SCREAMING kebab-case",
]


class Gigatoken:
    """Encodes with gigatoken; its tables are built when the first text comes, in each process anew.

    Args:
        model: a fast tokenizer as the text of its tokenizer.json, to be followed in all but its special tokens.
    """

    def __init__(self, model: str) -> None:
        self._model = model

    def __getstate__(self) -> dict[str, str]:
        return {"_model": self._model}

    def __call__(self, texts: Sequence[str]) -> Flat:
        """The ids of all texts, and how many each has.

        Worker processes of ours share the cores already, so there each keeps to its own thread (CPT_WORKER).
        """
        encoded = self._tokenizer.encode_batch(
            list(texts), parallel=False if os.environ.get("CPT_WORKER") else None
        ).layout
        lengths = np.diff(np.asarray(encoded.offsets.data)).astype(np.int64, copy=False)
        if len(lengths) != len(texts):
            raise RuntimeError(f"gigatoken gave {len(lengths)} documents for {len(texts)}")
        return np.asarray(encoded.content.data), lengths

    @cached_property
    def _tokenizer(self) -> Any:
        import gigatoken

        return gigatoken.Tokenizer.from_json(without_special_tokens(self._model))


def gigatoken_version() -> str | None:
    """`gigatoken 0.10.0`, or None where it is not installed."""
    try:
        return f"gigatoken {metadata.version('gigatoken')}"
    except metadata.PackageNotFoundError:
        return None


def without_special_tokens(model: str) -> str:
    """The tokenizer with special tokens read as text, which is what `encode_special_tokens` means to Hugging
    Face's."""
    content = json.loads(model)
    content["added_tokens"] = [token for token in content["added_tokens"] if not token["special"]]
    return json.dumps(content)


def why_not(model: str, by_hugging_face: Encode, by_gigatoken: Encode, documents: Sequence[str]) -> str | None:
    """Why gigatoken may not be used for a tokenizer and documents like these; None where every id is the same."""
    content = json.loads(model)
    if content["model"]["type"] != "BPE" or content["model"].get("byte_fallback"):
        return f"it is made for byte-level BPE, and this is {content['model']['type']}"
    texts = [text[:PIECE] for text in (*HARD_STRINGS, *around_added_tokens(content), *documents)]
    try:
        text = first_difference(texts, by_hugging_face, by_gigatoken)
    except (RuntimeError, ValueError) as problem:  # what it raises for a tokenizer that it does not know
        return (str(problem).splitlines() or [type(problem).__name__])[0]
    return None if text is None else f"its ids differ for {shortened(text)!r}"


def around_added_tokens(content: Mapping[str, Any]) -> Iterator[str]:
    """Texts with the added tokens inside, special or not, whole, doubled and cut short."""
    for token in [token["content"] for token in content["added_tokens"]][:1000]:
        yield from (token, f"a{token}b", f" {token} {token}{token}\n", f"a {token[:-1]}", f"{token.upper()} {token}s")


def first_difference(texts: Sequence[str], one: Encode, other: Encode) -> str | None:
    """The first text that two encoders do not give the same ids."""
    (ids, lengths), (other_ids, other_lengths) = one(texts), other(texts)
    if np.array_equal(lengths, other_lengths) and np.array_equal(ids, other_ids):
        return None
    parts, other_parts = (np.split(*flat) for flat in ((ids, lengths.cumsum()), (other_ids, other_lengths.cumsum())))
    return next(text for text, a, b in zip(texts, parts, other_parts, strict=False) if not np.array_equal(a, b))


def shortened(text: str) -> str:
    """A text that fits on a line."""
    return text if len(text) <= 80 else f"{text[:60]} ..."
