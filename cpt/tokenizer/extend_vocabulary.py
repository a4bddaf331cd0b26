"""Extend a tokenizer for a domain: merges learned on its text rank after the old ones, which stay as they are.

An old merge joins old tokens only, and a new merge leaves no new pair of old tokens, so a text is first encoded as
before and then merged further: no input gets longer. Every new token is reachable: it was learned as the result of its
merges in a word, none of which crossed its borders, so they also make it of its own string."""

import copy
import heapq
import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

from tokenizers import Regex, Tokenizer, pre_tokenizers
from transformers import PreTrainedTokenizerBase

from cpt.errors import DataError, RecipeError
from cpt.tokenizer.train_bpe import non_empty

MAX_WORD_CHARACTERS = 256  # a longer "word" is base64 or a line of symbols; nothing in it is worth a token
MAX_TOKEN_CHARACTERS = 32  # a longer token is a line of symbols or one file's phrase
MIN_COUNT = 2  # a pair that occurs once is no pattern
BYTE = re.compile("<0x[0-9A-F]{2}>")
# A SentencePiece tokenizer reads a whole text as one word, but its merges do not cross the beginning of a word.
SENTENCEPIECE_WORDS = pre_tokenizers.Split(Regex(r"▁*[^▁]+|▁+"), behavior="isolated")
# They rarely join letters, digits and symbols; new ones never do. Digits stay alone.
SENTENCEPIECE_TOKEN = pre_tokenizers.Split(
    Regex(r"▁+(?=▁)|▁?\p{L}[\p{L}\p{M}]*|▁?\p{N}|▁?[^▁\p{L}\p{N}]+|▁+"), behavior="isolated"
)
# Some tokens only come out with something around their text (@).
CONTEXTS = ("@", " @", "a@", "(@", "\n@", "@a", "a@a", " @ a", "1@", "@\n", ".@.")
REPLACEMENT = "\ufffd"

Pair = tuple[int, int]


@dataclass(frozen=True)
class NewToken:
    id: int
    token: str  # as in tokenizer.json
    text: str  # with U+FFFD for bytes that are no whole character
    pieces: tuple[int, ...]  # ids of the old tokens that it is made of
    count: int  # in the text, under all new merges; 0 for one that is only a step to longer tokens


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
    count: int  # how often the two were neighbours when it was learned
    pieces: tuple[int, ...]  # ids of the old tokens that it is made of
    word: int  # index of a word that has it, among those that were learned from


@dataclass(frozen=True)
class Bpe:
    backend: Tokenizer
    content: Mapping[str, Any]  # of tokenizer.json
    vocabulary: Mapping[str, int]  # token -> id, added tokens included
    is_byte_level: bool  # tokens are written in the 256 characters that stand for bytes; else as text (SentencePiece)

    def split(self, text: str) -> list[str]:
        """The words of a text, which merges never cross, in the characters that tokens are written in."""
        if self.backend.normalizer is not None:
            text = self.backend.normalizer.normalize_str(text)
        words = [text]
        if self.backend.pre_tokenizer is not None:
            words = [word for word, _ in self.backend.pre_tokenizer.pre_tokenize_str(text)]
        if self.is_byte_level:
            return words
        return [part for word in words for part, _ in SENTENCEPIECE_WORDS.pre_tokenize_str(word)]

    def may_be_token(self, token: str) -> bool:
        """Whether a new token may be this string: a part of a word of a tokenizer that splits texts into words."""
        is_blank = token.count("▁") == len(token)
        return self.is_byte_level or is_blank or len(SENTENCEPIECE_TOKEN.pre_tokenize_str(token)) == 1


def extend_vocabulary(tokenizer: PreTrainedTokenizerBase, documents: Iterable[str], num_tokens: int) -> Extension:
    """Continue the tokenizer's byte-pair encoding on `documents` by `num_tokens` merges.

    Old tokens keep their ids; the new ones follow the largest. Each new token is encoded to prove that it is reached.

    Raises:
        RecipeError: the tokenizer is of a kind that cannot be extended, or `num_tokens` is not at least 1.
        DataError: the text is too little for so many merges.
    """
    if num_tokens < 1:
        raise RecipeError(f"{num_tokens} tokens to add: at least 1 is needed (--add). 500 to 5,000 suit a domain.")
    bpe = read_bpe(tokenizer)
    words = Counter(word for document in non_empty(documents) for word in bpe.split(document))
    merges, backend = learn_reachable(bpe, words, num_tokens)
    if len(merges) < num_tokens:
        found = f"it has only {len(merges):,} pairs that occur twice"
        raise DataError(f"the text is too little for {num_tokens:,} new tokens: {found}. Give more, or ask for fewer.")
    counts = Counter[int]()
    for word, count in words.items():
        for token in backend.model.tokenize(word):
            counts[token.id] += count
    extended = copy.deepcopy(tokenizer)
    extended.backend_tokenizer.model = backend.model
    added = [NewToken(one.id, one.token, backend.decode([one.id]), one.pieces, counts[one.id]) for one in merges]
    return Extension(extended, added)


def read_bpe(tokenizer: PreTrainedTokenizerBase) -> Bpe:
    """Raises RecipeError if it is no byte-pair encoding, or one whose merges cannot be continued."""
    whose = f"the tokenizer of `{tokenizer.name_or_path}`"
    if not tokenizer.is_fast:
        raise RecipeError(f"{whose} is not a fast one ({type(tokenizer).__name__}): it has no merges to continue.")
    backend = tokenizer.backend_tokenizer
    content = json.loads(backend.to_str())
    model = content["model"]
    if model["type"] != "BPE":
        only = "Only byte-pair encodings (GPT-2, Llama, Qwen, Mistral, ...) can be extended."
        raise RecipeError(f"{whose} is {model['type']}, which has no merges to continue. {only}")
    if dropout := model.get("dropout"):
        raise RecipeError(f"{whose} drops merges at random (dropout {dropout}). Set it to null in tokenizer.json.")
    for key in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key):
            raise RecipeError(f"{whose} marks the parts of words (`{key}`: {model[key]!r}). Choose another model.")
    is_byte_level = '"ByteLevel"' in json.dumps(content["pre_tokenizer"])
    return Bpe(backend, content, backend.get_vocab(with_added_tokens=True), is_byte_level)


def learn_reachable(bpe: Bpe, words: Mapping[str, int], num_tokens: int) -> tuple[list[Merge], Tokenizer]:
    """Learn merges, and return them with the tokenizer that has them. The merges make every token reachable; only
    encoding shows that the words of some text lead there. A token that is not reached is forbidden, and the merges are
    learned again."""
    tokens = {number: token for token, number in bpe.vocabulary.items()}
    unknown = bpe.content["model"]["unk_token"]
    whole = {number for number, token in tokens.items() if not BYTE.fullmatch(token) and token != unknown}
    encoded, counts, origins = [], [], []
    for word in sorted(word for word in words if len(word) <= MAX_WORD_CHARACTERS):
        # SentencePiece's bytes, and its unknown token, are not merged.
        pieces = [token.id for token in bpe.backend.model.tokenize(word)]
        for is_whole, group in groupby(pieces, whole.__contains__):
            ids = list(group)
            if is_whole and len(ids) > 1:
                encoded.append(ids)
                counts.append(words[word])
                origins.append(word)
    forbidden = set(bpe.vocabulary)
    while True:
        merges = learn_merges(encoded, counts, tokens, num_tokens, max(tokens) + 1, forbidden, bpe.may_be_token)
        content: dict[str, Any] = json.loads(json.dumps(bpe.content))
        vocabulary: dict[str, int] = content["model"]["vocab"]
        # An added token that is not in the model's own vocabulary gets the next free id when the file is read, which
        # now is a new token's.
        vocabulary |= {token["content"]: token["id"] for token in content["added_tokens"]}
        strings = dict(tokens)
        for one in merges:
            strings[one.id] = one.token
            vocabulary[one.token] = one.id
            content["model"]["merges"].append([strings[one.left], strings[one.right]])
        backend = Tokenizer.from_str(json.dumps(content))
        backend.encode_special_tokens = bpe.backend.encode_special_tokens
        unreached = set()
        for one in merges:
            word = origins[one.word]
            begun = word[: word.find(one.token) + len(one.token)]  # as when it was learned, without what follows
            text = begun if backend.decoder is None else str(backend.decoder.decode([begun]))
            if not is_reached(backend, one.id, text):
                unreached.add(one.token)
        if not unreached:
            return merges, backend
        forbidden |= unreached


def is_reached(backend: Tokenizer, number: int, *examples: str) -> bool:
    """True if encoding gives the token for its own text, for that text in a context, or for one of the examples. For
    a part of a character, which has no text of its own, only the merges are checked."""
    text = backend.decode([number], skip_special_tokens=False)
    if REPLACEMENT in text:
        return [one.id for one in backend.model.tokenize(backend.id_to_token(number) or "")] == [number]
    texts = (*(context.replace("@", text) for context in CONTEXTS), *examples)
    return any(number in backend.encode(one, add_special_tokens=False).ids for one in texts)


def learn_merges(
    words: Sequence[Sequence[int]],
    counts: Sequence[int],
    tokens: Mapping[int, str],
    num_merges: int,
    first_id: int,
    forbidden: Iterable[str],
    may_be_token: Callable[[str], bool],
) -> list[Merge]:
    """The next merges, always of the most frequent pair; fewer where the words (as ids, each with its count in the
    text) run out of pairs. No new token is a string in `forbidden`, which holds the existing tokens."""
    pairs = Pairs(words, counts)
    strings, taken, pieces = dict(tokens), set(forbidden), dict[int, tuple[int, ...]]()
    merges: list[Merge] = []
    while len(merges) < num_merges and (found := pairs.most_frequent()) is not None:
        (left, right), count = found
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
        merges.append(Merge(number, token, left, right, count, pieces[number], min(pairs.where[left, right])))
        pairs.join((left, right), number)
    return merges


class Pairs:
    """Neighbouring tokens of all words: how often each pair occurs in the text, and in which words."""

    def __init__(self, words: Sequence[Sequence[int]], counts: Sequence[int]) -> None:
        self.words = [list(word) for word in words]
        self.counts = counts
        self.num: defaultdict[Pair, int] = defaultdict(int)
        self.where: defaultdict[Pair, set[int]] = defaultdict(set)
        self.forbidden: set[Pair] = set()
        for place, word in enumerate(self.words):
            for pair in pairwise(word):
                self.num[pair] += counts[place]
                self.where[pair].add(place)
        self.heap = [(-count, pair) for pair, count in self.num.items()]
        heapq.heapify(self.heap)

    def most_frequent(self) -> tuple[Pair, int] | None:
        """The most frequent pair, of equal ones that of the smallest ids; None at the end."""
        while self.heap:
            count, pair = self.heap[0]
            now = self.num.get(pair, 0)
            if now == -count and now and pair not in self.forbidden:
                return pair, now
            heapq.heappop(self.heap)
            # It became rarer since; a pair that became more frequent was pushed again.
            if 0 < now < -count and pair not in self.forbidden:
                heapq.heappush(self.heap, (-now, pair))
        return None

    def join(self, pair: Pair, number: int) -> None:
        """Write `number` for the pair in every word, from the left, as tokenizers do."""
        risen: set[Pair] = set()
        for place in self.where.pop(pair):
            word, count = self.words[place], self.counts[place]
            joined = join_in(word, pair, number)
            for old in pairwise(word):
                self.num[old] -= count
            for old in set(pairwise(word)) - {pair}:
                self.where[old].discard(place)
            for new in pairwise(joined):
                self.num[new] += count
                self.where[new].add(place)
                risen.add(new)
            self.words[place] = joined
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
