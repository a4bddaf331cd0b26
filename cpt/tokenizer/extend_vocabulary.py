"""Extend a tokenizer for a domain: further merges learned on its text, behind the old ones, with all that was there
left as it is."""

import copy
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from cpt.errors import DataError, RecipeError
from cpt.tokenizer.bpe import MAX_WORD_CHARACTERS, Bpe, count_words, read_bpe
from cpt.tokenizer.continued_bpe import Merge, learn_merges
from cpt.tokenizer.reachability import is_reached
from cpt.tokenizer.train_bpe import non_empty

BYTE = re.compile("<0x[0-9A-F]{2}>")


@dataclass(frozen=True)
class NewToken:
    """A token that was added.

    Attributes:
        token: as tokenizer.json writes it.
        text: what it stands for; bytes that are no whole character show as the replacement character.
        pieces: the old tokens that it is made of, by id.
        count: how often it stands in the text that it was learned from, under all new merges. 0: it is only a step to
            longer ones.
    """

    id: int
    token: str
    text: str
    pieces: tuple[int, ...]
    count: int


@dataclass(frozen=True)
class Extension:
    """An extended tokenizer, and what was added to it."""

    tokenizer: PreTrainedTokenizerBase
    tokens: list[NewToken]


def extend_vocabulary(tokenizer: PreTrainedTokenizerBase, documents: Iterable[str], num_tokens: int) -> Extension:
    """Continue the tokenizer's byte-pair encoding on `documents` by `num_tokens` merges.

    Old tokens keep their ids; the new ones follow on the largest of them. The new merges rank behind the old ones, so
    that no text gets longer; each new token is encoded once to see that it is reached.

    Raises:
        RecipeError: the tokenizer is of a kind that cannot be extended, or `num_tokens` is not at least 1.
        DataError: the text is too little for so many merges.
    """
    if num_tokens < 1:
        raise RecipeError(f"{num_tokens} tokens to add: at least 1 is needed (--add). 500 to 5,000 suit a domain.")
    name = str(tokenizer.name_or_path)
    if not tokenizer.is_fast:
        raise RecipeError(
            f"`{name}` has no fast tokenizer ({type(tokenizer).__name__} is written in Python), so its merges are not"
            " at hand. Choose another model."
        )
    bpe = read_bpe(tokenizer.backend_tokenizer, name)
    words = count_words(bpe, non_empty(documents))
    merges, backend = learn_reachable(bpe, words, num_tokens)
    if len(merges) < num_tokens:
        raise DataError(
            f"the text is too little for {num_tokens:,} new tokens: it ran out of pairs that stand in it twice at"
            f" {len(merges):,}. Give more text, or ask for at most"
            f" {len(merges):,}{'' if merges else ' (it needs some that repeats)'}."
        )
    extended = copy.deepcopy(tokenizer)
    extended._tokenizer = backend
    counts = count_tokens(bpe, words, backend)
    return Extension(
        extended, [NewToken(one.id, one.token, backend.decode([one.id]), one.pieces, counts[one.id]) for one in merges]
    )


def learn_reachable(bpe: Bpe, words: Mapping[str, int], num_tokens: int) -> tuple[list[Merge], Tokenizer]:
    """Merges of which each is reached by a text that was tried, and the tokenizer that has them.

    By their making all are, as far as the merges go; that the words of some text lead there too is seen by trying.
    """
    tokens = {number: token for token, number in bpe.vocabulary.items()}
    whole = {
        number
        for token, number in bpe.vocabulary.items()
        if not BYTE.fullmatch(token) and token != bpe.content["model"]["unk_token"]
    }
    ordered = sorted(word for word in words if len(word) <= MAX_WORD_CHARACTERS)
    encoded, counts, origins = [], [], []
    for word in ordered:
        for ids in parts_to_merge(bpe.pieces(word), whole):
            encoded.append(ids)
            counts.append(words[word])
            origins.append(word)
    forbidden = set(bpe.vocabulary)
    while True:
        merges = learn_merges(
            encoded, counts, tokens, num_tokens, max(bpe.vocabulary.values()) + 1, forbidden, bpe.may_be_token
        )
        backend = with_merges(bpe, merges, tokens)
        unreached = {
            one.token
            for one in merges
            if not is_reached(backend, one.id, word_up_to(backend, origins[one.word], one.token))
        }
        if not unreached:
            return merges, backend
        forbidden |= unreached


def parts_to_merge(ids: Sequence[int], whole: Set[int]) -> Iterator[list[int]]:
    """The longest parts of a word that hold only whole characters: SentencePiece's bytes, and its unknown token, are
    not merged."""
    for is_whole, part in groupby(ids, whole.__contains__):
        if is_whole and len(found := list(part)) > 1:
            yield found


def word_up_to(backend: Tokenizer, word: str, token: str) -> str:
    """The text of a word up to the end of a token that it holds: as it stood when the token was learned, with nothing
    behind it."""
    end = word.find(token) + len(token)
    return str(backend.decoder.decode([word[:end]])) if backend.decoder is not None else word[:end]


def with_merges(bpe: Bpe, merges: Iterable[Merge], tokens: Mapping[int, str]) -> Tokenizer:
    """The tokenizer with further merges at the end of its list."""
    content: dict[str, Any] = json.loads(json.dumps(bpe.content))
    vocabulary: dict[str, int] = content["model"]["vocab"]
    # An added token that is not in the model's own vocabulary gets the id after it when the file is read, which is now
    # a new token's.
    vocabulary |= {token["content"]: token["id"] for token in content["added_tokens"]}
    strings = dict(tokens)
    for one in merges:
        strings[one.id] = one.token
        vocabulary[one.token] = one.id
        content["model"]["merges"].append([strings[one.left], strings[one.right]])
    backend = Tokenizer.from_str(json.dumps(content))
    backend.encode_special_tokens = bpe.backend.encode_special_tokens
    return backend


def count_tokens(bpe: Bpe, words: Mapping[str, int], backend: Tokenizer) -> Counter[int]:
    """How often each token stands in the words under the merges of `backend`."""
    counts = Counter[int]()
    for word, count in words.items():
        for token in backend.model.tokenize(word):
            counts[token.id] += count
    return counts
