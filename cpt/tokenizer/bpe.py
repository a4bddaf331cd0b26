"""Look into a fast tokenizer's byte-pair encoding: its vocabulary, its merges, and the words that merges never
cross."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import Regex, Tokenizer, pre_tokenizers

from cpt.errors import RecipeError

MAX_WORD_CHARACTERS = 256  # a longer "word" is base64 or a line of signs; nothing that is worth a token repeats inside
# A SentencePiece tokenizer reads a whole text as one word, but its merges do not cross the beginning of a word.
SENTENCEPIECE_WORDS = pre_tokenizers.Split(Regex(r"▁*[^▁]+|▁+"), behavior="isolated")
# Nor do they join letters, digits and signs, as a rule; new ones never do. Digits stay alone.
SENTENCEPIECE_TOKEN = pre_tokenizers.Split(
    Regex(r"▁+(?=▁)|▁?\p{L}[\p{L}\p{M}]*|▁?\p{N}|▁?[^▁\p{L}\p{N}]+|▁+"), behavior="isolated"
)
WHY_NOT = {
    "WordPiece": "it always takes the longest piece of its list, so a new piece would change how old text is read",
    "Unigram": "its pieces have probabilities instead of merges, so a new piece would change how old text is read",
    "WordLevel": "it knows whole words only",
}


@dataclass(frozen=True)
class Bpe:
    """A fast tokenizer's byte-pair encoding.

    Attributes:
        content: the tokenizer as tokenizer.json has it.
        vocabulary: token -> id, added tokens included.
        is_byte_level: tokens are written in the 256 signs that stand for bytes; else in characters (SentencePiece).
    """

    backend: Tokenizer
    content: Mapping[str, Any]
    vocabulary: Mapping[str, int]
    is_byte_level: bool

    def split(self, text: str) -> list[str]:
        """The words of a text, in the signs that tokens are written in."""
        if self.backend.normalizer is not None:
            text = self.backend.normalizer.normalize_str(text)
        if self.backend.pre_tokenizer is not None:
            words = [word for word, _ in self.backend.pre_tokenizer.pre_tokenize_str(text)]
        else:
            words = [text]
        if self.is_byte_level:
            return words
        return [part for word in words for part, _ in SENTENCEPIECE_WORDS.pre_tokenize_str(word)]

    def may_be_token(self, token: str) -> bool:
        """Whether a new token may read so: where the tokenizer splits texts into words itself, any part of one."""
        return (
            self.is_byte_level
            or token.count("▁") == len(token)
            or len(SENTENCEPIECE_TOKEN.pre_tokenize_str(token)) == 1
        )

    def pieces(self, word: str) -> list[int]:
        """The ids that the merges make of a word."""
        return [token.id for token in self.backend.model.tokenize(word)]


def read_bpe(backend: Tokenizer, name: str) -> Bpe:
    """Look into a tokenizer whose merges can be continued.

    Args:
        name: what the user calls it, for messages.

    Raises:
        RecipeError: it is no byte-pair encoding, or one of a kind whose merges cannot be continued, with the reason.
    """
    content = json.loads(backend.to_str())
    model = content["model"]
    if model["type"] != "BPE":
        raise RecipeError(
            f"the tokenizer of `{name}` is {model['type']}:"
            f" {WHY_NOT.get(model['type'], 'it has no merges to continue')}. Only byte-pair encodings (GPT-2, Llama,"
            " Qwen, Mistral, ...) can be extended."
        )
    if model.get("dropout"):
        raise RecipeError(
            f"the tokenizer of `{name}` drops merges at random (dropout {model['dropout']}). Set it to null in"
            " tokenizer.json."
        )
    for key in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key):
            marks = f"marks the parts of words (`{key}`: {model[key]!r})"
            raise RecipeError(f"the tokenizer of `{name}` {marks}, which is not supported. Choose another.")
    return Bpe(
        backend,
        content,
        backend.get_vocab(with_added_tokens=True),
        '"ByteLevel"' in json.dumps(content["pre_tokenizer"]),
    )


def count_words(bpe: Bpe, documents: Iterable[str]) -> Counter[str]:
    """How often each word stands in the documents; special tokens written in them are text."""
    words = Counter[str]()
    for document in documents:
        words.update(bpe.split(document))
    return words
