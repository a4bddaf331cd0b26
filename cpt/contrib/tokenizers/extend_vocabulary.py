"""Extend a tokenizer for a domain: merges learned on its text are ranked after the old ones, which are unchanged.

An old merge joins only old tokens, and a new merge adds no new pair of old tokens, so a text is first encoded as
before and then merged further: no text gets longer. Every new token is reachable: it was learned from its merges
inside a word, none of which crossed its ends, so the same merges also produce it from its text alone."""

import copy
import heapq
import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, pairwise
from typing import Any

from tokenizers import Regex, Tokenizer, pre_tokenizers
from transformers import PreTrainedTokenizerBase

from cpt.contrib.tokenizers.train_bpe import non_empty
from cpt.errors import DataError, RecipeError

MAX_WORD_CHARACTERS = 256  # a longer "word" is base64 or a line of symbols, not worth a token
MAX_TOKEN_CHARACTERS = 32  # a longer token is a line of symbols or a phrase from one file
MIN_COUNT = 2  # a pair that occurs once is not a pattern
BYTE = re.compile("<0x[0-9A-F]{2}>")
# A SentencePiece tokenizer treats a text as one word, but its merges do not cross the start of a word.
SENTENCEPIECE_WORDS = pre_tokenizers.Split(Regex(r"▁*[^▁]+|▁+"), behavior="isolated")
# Old merges rarely join letters, digits and symbols; new ones never do. Digits stay single.
SENTENCEPIECE_TOKEN = pre_tokenizers.Split(
    Regex(r"▁+(?=▁)|▁?\p{L}[\p{L}\p{M}]*|▁?\p{N}|▁?[^▁\p{L}\p{N}]+|▁+"), behavior="isolated"
)
# Some tokens only occur with other text around them (@).
CONTEXTS = ("@", " @", "a@", "(@", "\n@", "@a", "a@a", " @ a", "1@", "@\n", ".@.")
REPLACEMENT = "\ufffd"

Pair = tuple[int, int]


@dataclass(frozen=True)
class NewToken:
    id: int
    token: str  # as in tokenizer.json
    text: str  # with U+FFFD for incomplete characters
    pieces: tuple[int, ...]  # ids of the old tokens that form it
    count: int  # in the text, with all new merges; 0 for a mere step to longer tokens


@dataclass(frozen=True)
class Extension:
    tokenizer: PreTrainedTokenizerBase
    tokens: list[NewToken]


@dataclass(frozen=True)
class Merge:
    id: int
    token: str
    left: int
    right: int
    count: int  # count of the pair when it was learned
    pieces: tuple[int, ...]  # ids of the old tokens that form it
    word: int  # index of a training word that contains it


@dataclass(frozen=True)
class Bpe:
    backend: Tokenizer
    content: Mapping[str, Any]  # content of tokenizer.json
    vocabulary: Mapping[str, int]  # token -> id, including added tokens
    is_byte_level: bool  # tokens use 256 characters for bytes; otherwise text (SentencePiece)

    def split(self, text: str) -> list[str]:
        """The words of a text, which merges never cross, in the characters of tokens."""
        if self.backend.normalizer is not None:
            text = self.backend.normalizer.normalize_str(text)
        words = [text]
        if self.backend.pre_tokenizer is not None:
            words = [word for word, _ in self.backend.pre_tokenizer.pre_tokenize_str(text)]
        if self.is_byte_level:
            return words
        return [part for word in words for part, _ in SENTENCEPIECE_WORDS.pre_tokenize_str(word)]

    def may_be_token(self, token: str) -> bool:
        """Whether a new token may be this string: part of a word, if the tokenizer splits texts into words."""
        is_blank = token.count("▁") == len(token)
        return (
            self.is_byte_level or is_blank or len(SENTENCEPIECE_TOKEN.pre_tokenize_str(token)) == 1
        )


def extend_vocabulary(
    tokenizer: PreTrainedTokenizerBase, documents: Iterable[str], num_tokens: int
) -> Extension:
    """Continue the tokenizer's byte-pair encoding on `documents` with `num_tokens` merges.

    Old tokens keep their ids; new ones follow the largest id. Each new token is encoded to verify that it is reached.

    Raises:
        RecipeError: the tokenizer cannot be extended, or `num_tokens` is below 1.
        DataError: too little text for this many merges.
    """
    if num_tokens < 1:
        raise RecipeError(f"--add {num_tokens}: expected at least 1. 500 to 5,000 suit a domain.")
    bpe = read_bpe(tokenizer)
    word_counts = Counter(chain.from_iterable(map(bpe.split, non_empty(documents))))
    merges, backend = learn_reachable(bpe, word_counts, num_tokens)
    if len(merges) < num_tokens:
        shortage = f"only {len(merges):,} pairs occur twice"
        raise DataError(
            f"too little text for {num_tokens:,} new tokens: {shortage}. Add text, or request fewer tokens."
        )
    counts = Counter[int]()
    for word, count in word_counts.items():
        for token in backend.model.tokenize(word):
            counts[token.id] += count
    extended = copy.deepcopy(tokenizer)
    extended.backend_tokenizer.model = backend.model
    added = []
    for merge in merges:
        added.append(
            NewToken(
                merge.id, merge.token, backend.decode([merge.id]), merge.pieces, counts[merge.id]
            )
        )
    return Extension(extended, added)


def read_bpe(tokenizer: PreTrainedTokenizerBase) -> Bpe:
    """Read the tokenizer; RecipeError if it is not a byte-pair encoding, or its merges cannot be continued."""
    subject = f"the tokenizer of `{tokenizer.name_or_path}`"
    if not tokenizer.is_fast:
        raise RecipeError(
            f"{subject} is not a fast tokenizer ({type(tokenizer).__name__}) and cannot be extended."
        )
    backend = tokenizer.backend_tokenizer
    content = json.loads(backend.to_str())
    model = content["model"]
    if model["type"] != "BPE":
        only = "Only byte-pair encodings (GPT-2, Llama, Qwen, Mistral, ...) can be extended."
        raise RecipeError(f"{subject} is {model['type']}. {only}")
    dropout = model.get("dropout")
    if dropout:
        raise RecipeError(
            f"{subject} drops merges at random (dropout {dropout}). Set it to null in tokenizer.json."
        )
    for key in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key):
            raise RecipeError(
                f"{subject} marks the parts of words (`{key}`: {model[key]!r}). Choose another model."
            )
    is_byte_level = '"ByteLevel"' in json.dumps(content["pre_tokenizer"])
    return Bpe(backend, content, backend.get_vocab(with_added_tokens=True), is_byte_level)


def learn_reachable(
    bpe: Bpe, words: Mapping[str, int], num_tokens: int
) -> tuple[list[Merge], Tokenizer]:
    """Learn merges, and return them with the extended tokenizer. The merges make every token reachable in principle;
    only encoding shows whether some text leads to it. A token that is not reached is forbidden, and the merges are
    learned again."""
    tokens = {number: token for token, number in bpe.vocabulary.items()}
    encoded = list(encode_words(bpe, words, tokens))
    origins = [word for word, _ in encoded]
    forbidden = set(bpe.vocabulary)
    while True:
        merges = learn_merges(
            words=[ids for _, ids in encoded],
            counts=[words[word] for word in origins],
            tokens=tokens,
            num_merges=num_tokens,
            first_id=max(tokens) + 1,
            forbidden=forbidden,
            may_be_token=bpe.may_be_token,
        )
        backend = with_merges(bpe, merges, tokens)
        unreached = set()
        for merge in merges:
            word = origins[merge.word]
            end = word.find(merge.token) + len(merge.token)
            begun = word[:end]  # as when it was learned, without the rest
            text = begun if backend.decoder is None else str(backend.decoder.decode([begun]))
            if not is_reached(backend, merge.id, text):
                unreached.add(merge.token)
        if not unreached:
            return merges, backend
        forbidden |= unreached


def encode_words(
    bpe: Bpe, words: Iterable[str], tokens: Mapping[int, str]
) -> Iterator[tuple[str, list[int]]]:
    """Yield the sequences of tokens that may be merged, each with its word, in the order of the words. SentencePiece's
    bytes and its unknown token are not merged."""
    unknown = bpe.content["model"]["unk_token"]
    mergeable = set()
    for number, token in tokens.items():
        if token != unknown and not BYTE.fullmatch(token):
            mergeable.add(number)
    for word in sorted(words):
        if len(word) > MAX_WORD_CHARACTERS:
            continue
        pieces = [token.id for token in bpe.backend.model.tokenize(word)]
        for may_be_merged, group in groupby(pieces, mergeable.__contains__):
            ids = list(group)
            if may_be_merged and len(ids) > 1:
                yield word, ids


def with_merges(bpe: Bpe, merges: Iterable[Merge], tokens: Mapping[int, str]) -> Tokenizer:
    """Return the tokenizer with these merges after its own."""
    content: dict[str, Any] = json.loads(json.dumps(bpe.content))
    vocabulary: dict[str, int] = content["model"]["vocab"]
    # An added token outside the model's vocabulary gets the next free id when the file is read; that
    # id now belongs to a new token.
    for added_token in content["added_tokens"]:
        vocabulary[added_token["content"]] = added_token["id"]
    strings = dict(tokens)
    for merge in merges:
        strings[merge.id] = merge.token
        vocabulary[merge.token] = merge.id
        content["model"]["merges"].append([strings[merge.left], strings[merge.right]])
    backend = Tokenizer.from_str(json.dumps(content))
    backend.encode_special_tokens = bpe.backend.encode_special_tokens
    return backend


def is_reached(backend: Tokenizer, number: int, *examples: str) -> bool:
    """Whether encoding gives the token for its text, for that text in a context, or for one of the examples. For a
    part of a character, which cannot be written as text, only the merges are checked."""
    text = backend.decode([number], skip_special_tokens=False)
    if REPLACEMENT in text:
        pieces = backend.model.tokenize(backend.id_to_token(number) or "")
        return [piece.id for piece in pieces] == [number]
    texts = (*(context.replace("@", text) for context in CONTEXTS), *examples)
    return any(number in backend.encode(sample, add_special_tokens=False).ids for sample in texts)


def learn_merges(
    words: Sequence[Sequence[int]],
    counts: Sequence[int],
    tokens: Mapping[int, str],
    num_merges: int,
    first_id: int,
    forbidden: Iterable[str],
    may_be_token: Callable[[str], bool],
) -> list[Merge]:
    """The next merges, always of the most frequent pair; fewer if the words (as ids, each with its count in the text)
    run out of pairs. New tokens are never strings in `forbidden`, which has the existing tokens."""
    pairs = Pairs(words, counts)
    strings = dict(tokens)
    taken = set(forbidden)
    pieces = dict[int, tuple[int, ...]]()
    merges: list[Merge] = []
    while len(merges) < num_merges and (most_frequent := pairs.most_frequent()) is not None:
        (left, right), count = most_frequent
        if count < MIN_COUNT:
            break
        token = strings[left] + strings[right]
        if token in taken or len(token) > MAX_TOKEN_CHARACTERS or not may_be_token(token):
            pairs.forbidden.add((left, right))
            continue
        number = first_id + len(merges)
        taken.add(token)
        strings[number] = token
        pieces[number] = pieces.get(left, (left,)) + pieces.get(right, (right,))
        merges.append(
            Merge(number, token, left, right, count, pieces[number], min(pairs.where[left, right]))
        )
        pairs.join((left, right), number)
    return merges


class Pairs:
    """Neighbouring tokens of all words: the count of each pair in the text, and the words that contain it."""

    def __init__(self, words: Sequence[Sequence[int]], counts: Sequence[int]) -> None:
        self.words = list(map(list, words))
        self.counts = counts
        self.num: defaultdict[Pair, int] = defaultdict(int)
        self.where: defaultdict[Pair, set[int]] = defaultdict(set)
        self.forbidden: set[Pair] = set()
        for word_index, word in enumerate(self.words):
            for pair in pairwise(word):
                self.num[pair] += counts[word_index]
                self.where[pair].add(word_index)
        self.heap = [(-count, pair) for pair, count in self.num.items()]
        heapq.heapify(self.heap)

    def most_frequent(self) -> tuple[Pair, int] | None:
        """The most frequent pair, among equals that with the smallest ids; None at the end."""
        while self.heap:
            count, pair = self.heap[0]
            count_of_pair = self.num.get(pair, 0)
            if count_of_pair == -count and count_of_pair and pair not in self.forbidden:
                return pair, count_of_pair
            heapq.heappop(self.heap)
            # It became rarer since then; a pair that became more frequent was pushed again.
            if 0 < count_of_pair < -count and pair not in self.forbidden:
                heapq.heappush(self.heap, (-count_of_pair, pair))
        return None

    def join(self, pair: Pair, number: int) -> None:
        """Replace the pair by `number` in every word, from the left, as tokenizers do."""
        risen: set[Pair] = set()
        for word_index in self.where.pop(pair):
            word = self.words[word_index]
            count = self.counts[word_index]
            joined = join_in(word, pair, number)
            for old in pairwise(word):
                self.num[old] -= count
            for old in set(pairwise(word)) - {pair}:
                self.where[old].discard(word_index)
            for new in pairwise(joined):
                self.num[new] += count
                self.where[new].add(word_index)
                risen.add(new)
            self.words[word_index] = joined
        del self.num[pair]
        for new in risen:
            heapq.heappush(self.heap, (-self.num[new], new))


def join_in(word: Sequence[int], pair: Pair, number: int) -> list[int]:
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
