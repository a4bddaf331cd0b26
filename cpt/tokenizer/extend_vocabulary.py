"""Extend a tokenizer for a domain: merges learned on its text rank behind the old ones, and nothing old changes.

An old merge joins old tokens only, and a new merge leaves no new pair of old tokens behind, so a text is first encoded
exactly as before and then merged further: no input gets longer. A token that was learned as the result of its merges
in a word is also what these merges make of its own string, since none of them crossed its borders: all are reachable.
"""

import copy
import heapq
import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from tokenizers import Regex, Tokenizer, pre_tokenizers
from transformers import PreTrainedTokenizerBase

from cpt.errors import DataError, RecipeError
from cpt.tokenizer.reachability import is_reached
from cpt.tokenizer.train_bpe import non_empty

BYTE = re.compile("<0x[0-9A-F]{2}>")


MAX_TOKEN_CHARACTERS = 32  # a longer token is a line of signs or one file's phrase


MIN_COUNT = 2  # what was seen once is no pattern


Pair = tuple[int, int]


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


@dataclass(frozen=True)
class Merge:
    """A new token: the two that it joins, how often they stood beside each other when it was learned, and a word in
    which they did.

    Attributes:
        pieces: the ids of the old tokens that it is made of.
        word: place of the word among those that were learned from.
    """

    id: int
    token: str
    left: int
    right: int
    count: int
    pieces: tuple[int, ...]
    word: int


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


def learn_merges(
    words: Sequence[Sequence[int]],
    counts: Sequence[int],
    tokens: Mapping[int, str],
    num_merges: int,
    first_id: int,
    forbidden: Iterable[str],
    may_be_token: Callable[[str], bool],
) -> list[Merge]:
    """The `num_merges` next merges, or fewer where the words run out of pairs.

    Args:
        words: ids that the tokenizer makes of each different word.
        counts: how often each word stands in the text.
        tokens: id -> token, in the tokenizer's own signs.
        first_id: of the first new token; the others follow.
        forbidden: strings that are no new token, such as those that are tokens already.
        may_be_token: what else is asked of a new token.
    """
    pairs = Pairs(words, counts)
    strings, taken, pieces = dict(tokens), set(forbidden), dict[int, tuple[int, ...]]()
    merges: list[Merge] = []
    while len(merges) < num_merges and (found := pairs.most_frequent()) is not None:
        (left, right), count = found
        if count < MIN_COUNT:
            break
        token = strings[left] + strings[right]
        if token in taken or len(token) > MAX_TOKEN_CHARACTERS or not may_be_token(token):
            pairs.forbid((left, right))
            continue
        number = first_id + len(merges)
        taken.add(token)
        strings[number] = token
        pieces[number] = pieces.get(left, (left,)) + pieces.get(right, (right,))
        merges.append(Merge(number, token, left, right, count, pieces[number], min(pairs.where[left, right])))
        pairs.join((left, right), number)
    return merges


class Pairs:
    """Neighbouring tokens of all words, how often each pair stands in the text, and in which words."""

    def __init__(self, words: Sequence[Sequence[int]], counts: Sequence[int]) -> None:
        self.words = [list(word) for word in words]
        self.counts = counts
        self.num: defaultdict[Pair, int] = defaultdict(int)
        self.where: defaultdict[Pair, set[int]] = defaultdict(set)
        self.forbidden: set[Pair] = set()
        for place, word in enumerate(self.words):
            for pair in zip(word, word[1:], strict=False):
                self.num[pair] += counts[place]
                self.where[pair].add(place)
        self.heap = [(-count, pair) for pair, count in self.num.items()]
        heapq.heapify(self.heap)

    def most_frequent(self) -> tuple[Pair, int] | None:
        """The pair that stands most often in the text, of equal ones that of the smallest ids; None where none is
        left."""
        while self.heap:
            count, pair = self.heap[0]
            now = self.num.get(pair, 0)
            if now == -count and now and pair not in self.forbidden:
                return pair, now
            heapq.heappop(self.heap)
            if (
                0 < now < -count and pair not in self.forbidden
            ):  # it became rarer since; a pair that became more frequent stands here anew
                heapq.heappush(self.heap, (-now, pair))
        return None

    def forbid(self, pair: Pair) -> None:
        self.forbidden.add(pair)

    def join(self, pair: Pair, number: int) -> None:
        """Write `number` for the pair wherever it stands, from the left, as tokenizers do."""
        risen: set[Pair] = set()
        for place in self.where.pop(pair):
            word, count = self.words[place], self.counts[place]
            joined = join_in(word, pair, number)
            for old in zip(word, word[1:], strict=False):
                self.num[old] -= count
            for old in set(zip(word, word[1:], strict=False)) - {pair}:
                self.where[old].discard(place)
            for new in zip(joined, joined[1:], strict=False):
                self.num[new] += count
                self.where[new].add(place)
                risen.add(new)
            self.words[place] = joined
        del self.num[pair]
        for new in risen:
            heapq.heappush(self.heap, (-self.num[new], new))


def join_in(word: Sequence[int], pair: Pair, number: int) -> list[int]:
    """A word with one token for the pair."""
    joined: list[int] = []
    i = 0
    while i < len(word):
        if i + 1 < len(word) and (word[i], word[i + 1]) == pair:
            joined.append(number)
            i += 2
        else:
            joined.append(word[i])
            i += 1
    return joined


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
