"""Turn texts into ids: BOS where the tokenizer has one, the text, EOS; each exactly once, and none of them from inside a text."""

import copy
import json
from collections.abc import Sequence

import numpy as np
import tokenizers
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase
from xxhash import xxh3_128_hexdigest

from cpt.errors import RecipeError

Ids = NDArray[np.unsignedinteger]


class DocumentEncoder:
    """Encodes documents with the tokenizer's own rules, except that text never becomes a special token.

    `</s>` or `<|im_end|>` written in a document is text like any other: a document cannot end itself or open a chat turn. Added tokens
    that are not special (new words of a domain) are found as always.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if tokenizer.eos_token_id is None:
            raise RecipeError(
                f"the tokenizer `{tokenizer.name_or_path}` has no end-of-sequence token, so documents would run into each other. "
                "Set `tokenizer.path` to one that has, or give it one: tokenizer.add_special_tokens({'eos_token': ...})."
            )
        self.eos = int(tokenizer.eos_token_id)
        self.bos = int(tokenizer.bos_token_id) if adds_bos(tokenizer) else None
        self.pad = int(tokenizer.pad_token_id) if tokenizer.pad_token_id is not None else self.eos
        vocabulary = tokenizer.get_vocab()
        self.dtype = np.dtype(np.uint16 if max(vocabulary.values()) < 2**16 else np.uint32)
        self._tokenizer = tokenizer
        # A copy of the fast tokenizer: our settings must not reach the one that the user holds.
        self._fast: tokenizers.Tokenizer | None = copy.deepcopy(tokenizer.backend_tokenizer) if tokenizer.is_fast else None
        if self._fast is not None:
            self._fast.no_truncation()
            self._fast.no_padding()
            self._fast.encode_special_tokens = True
        model = self._fast.to_str() if self._fast is not None else json.dumps([type(tokenizer).__name__, sorted(vocabulary.items())])
        self.fingerprint = xxh3_128_hexdigest(f"{model} bos {self.bos} eos {self.eos} tokenizers {tokenizers.__version__}".encode())
        self._special = dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
        if tokenizer.unk_token_id not in (self.eos, self.bos):  # it may stand in a text; GPT-2's is its EOS, which may not
            self._special.pop(tokenizer.unk_token_id, None)

    def encode(self, texts: Sequence[str]) -> tuple[Ids, NDArray[np.int64]]:
        """The ids of all texts, one document after the other, and how many each has."""
        before, after = np.array([] if self.bos is None else [self.bos], self.dtype), np.array([self.eos], self.dtype)
        encoded = self._encode_texts(texts)
        lengths = np.array([len(before) + len(ids) + 1 for ids in encoded], np.int64)
        return np.concatenate([part for ids in encoded for part in (before, ids, after)]), lengths

    def _encode_texts(self, texts: Sequence[str]) -> list[Ids]:
        # The place for a faster encoder (gigatoken): it must give the same ids as Hugging Face's, proven at the start of a run.
        return [self._without_special(ids) if self._has_special(ids) else ids for ids in self._encode_batch(texts)]

    def _encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        if self._fast is not None:
            return [np.array(encoding.ids, self.dtype) for encoding in self._fast.encode_batch_fast(list(texts), add_special_tokens=False)]
        encoded = self._tokenizer(list(texts), add_special_tokens=False, split_special_tokens=True)["input_ids"]
        return [np.array(ids, self.dtype) for ids in encoded]

    def _has_special(self, ids: Ids) -> bool:
        return bool(np.isin(ids, list(self._special)).any())

    def _without_special(self, ids: Ids) -> Ids:
        """Replace special ids that are ordinary vocabulary too (SentencePiece's `</s>`) by the ids of their spelling in pieces."""
        plain = [self._spelled(self._special[i]) if i in self._special else [i] for i in ids.tolist()]
        return np.array([i for part in plain for i in part], self.dtype)

    def _spelled(self, token: str) -> list[int]:
        if len(token) < 2:
            raise RecipeError(
                f"the tokenizer has `{token}`, one character, as a special token, so text cannot be told from it. Choose another."
            )
        half = len(token) // 2
        parts = token[:half], token[half:]
        encoded = zip(parts, self._encode_batch(parts), strict=True)
        return [i for part, ids in encoded for i in (self._spelled(part) if self._has_special(ids) else ids.tolist())]


def adds_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    """True if the tokenizer itself puts its BOS in front of a text."""
    with_special: list[int] = tokenizer("a")["input_ids"]  # type: ignore[assignment]
    without: list[int] = tokenizer("a", add_special_tokens=False)["input_ids"]  # type: ignore[assignment]
    bos = tokenizer.bos_token_id
    return bos is not None and with_special[:1] == [bos] and without[:1] != [bos]
