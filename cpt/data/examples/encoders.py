"""The encoder that a source needs: for texts, gaps to fill, chats, or examples."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest, xxh3_128_hexdigest

from cpt.data.examples.encoder import ExampleEncoder
from cpt.data.store.tokenization import DocumentEncoder, Ids
from cpt.errors import RecipeError
from cpt.recipe.schema import DocumentSource, Source

MARKS = [  # before the prefix, the suffix and the middle
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
]


class MiddleEncoder(DocumentEncoder):
    """Encodes a share of the documents as prefix, suffix, middle, or as suffix, prefix, middle; the others as they
    are.

    Which documents, and where they are cut, follows from the hash of their text. Cuts lie between any two characters,
    as they do where an editor asks, so the parts are encoded by themselves.
    """

    def __init__(self, encoder: DocumentEncoder, options: Mapping[Any, float], key: str) -> None:
        vars(self).update(vars(encoder))
        self.options = {"rate": 0.5, "suffix_first_rate": 0.5, **options}
        ids = [[encoder.id_of(mark) for mark in marks] for marks in MARKS]
        self.marks = next(([id_ for id_ in found if id_ is not None] for found in ids if None not in found), [])
        if not self.marks:
            known = "; ".join(" ".join(marks) for marks in MARKS)
            raise RecipeError(
                f"`{key}.fill_in_the_middle`: the tokenizer `{encoder.name}` has no marks for it (looked for {known})."
                " Remove the key, or add such tokens to the tokenizer."
            )
        self.fingerprint = xxh3_128_hexdigest(f"{encoder.fingerprint} {self.marks} {self.options}".encode())

    def encode(self, texts: Sequence[str]) -> tuple[Ids, NDArray[np.int64]]:
        parts = [self.parts_of(text) for text in texts]
        ids, lengths = super().encode([part for some in parts for part in some])
        first = 0 if self.bos is None else 1
        each = iter(part[first:-1] for part in np.split(ids, lengths.cumsum()[:-1]))  # without BOS and EOS
        documents = [self.joined([next(each) for _ in some], text) for some, text in zip(parts, texts, strict=True)]
        return np.concatenate([np.empty(0, self.dtype), *documents]), np.array(
            [len(ids) for ids in documents], np.int64
        )

    def parts_of(self, text: str) -> list[str]:
        if drawn(text, "rate") >= self.options["rate"]:
            return [text]
        one, other = sorted(int(drawn(text, cut) * (len(text) + 1)) for cut in ("one", "other"))
        return [text[:one], text[one:other], text[other:]]

    def joined(self, parts: list[Ids], text: str) -> Ids:
        """One document of the parts' ids; suffix first is written as StarCoder and most since do (the paper's SPM,
        variant 2)."""
        before, end = np.array([] if self.bos is None else [self.bos], self.dtype), np.array([self.eos], self.dtype)
        if len(parts) == 1:
            return np.concatenate([before, parts[0], end])
        prefix_mark, suffix_mark, middle_mark = np.array(self.marks, self.dtype)[:, None]
        prefix, middle, suffix = parts
        if drawn(text, "order") < self.options["suffix_first_rate"]:
            return np.concatenate([before, prefix_mark, suffix_mark, suffix, middle_mark, prefix, middle, end])
        return np.concatenate([before, prefix_mark, prefix, suffix_mark, suffix, middle_mark, middle, end])


def drawn(text: str, purpose: str) -> float:
    return xxh3_64_intdigest(f"fill in the middle {purpose}\n{text}".encode()) / 2**64


# --- encoders ---


def encoder_of(source: DocumentSource, encoder: DocumentEncoder, key: str) -> DocumentEncoder:
    """The tokenizer's encoder, as the source asks for it."""
    if source.chat is not None:  # which names the form of examples too
        return ExampleEncoder(encoder, source, key)
    if isinstance(source, Source) and source.fill_in_the_middle is not None:
        return MiddleEncoder(encoder, source.fill_in_the_middle, key)
    return encoder
