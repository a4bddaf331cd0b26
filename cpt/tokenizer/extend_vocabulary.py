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
WHY_NOT = {
    "WordPiece": "it always takes the longest piece of its list, so a new piece would change how old text is read",
    "Unigram": "its pieces have probabilities instead of merges, so a new piece would change how old text is read",
    "WordLevel": "it knows whole words only",
}
# Some tokens only come out with something around their text (@).
CONTEXTS = ("@", " @", "a@", "(@", "\n@", "@a", "a@a", " @ a", "1@", "@\n", ".@.")
REPLACEMENT = "\ufffd"

Pair = tuple[int, int]


@dataclass(frozen=True)
class NewToken:
    """A token that was added.

    Attributes:
        token: as tokenizer.json writes it.
        text: bytes that are no whole character show as the replacement character.
        pieces: the ids of the old tokens that it is made of.
        count: how often it occurs in the text that it was learned from, under all new merges. 0: it is only a step to
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
    """A new token and the two that it joins.

    Attributes:
        count: how often the two were neighbours when it was learned.
        pieces: the ids of the old tokens that it is made of.
        word: index of a word that has it, among those that were learned from.
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
        content: the tokenizer as in tokenizer.json.
        vocabulary: token -> id, added tokens included.
        is_byte_level: tokens are written in the 256 characters that stand for bytes; else as text (SentencePiece).
    """

    backend: Tokenizer
    content: Mapping[str, Any]
    vocabulary: Mapping[str, int]
    is_byte_level: bool

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
        """Whether a new token may read so: any part of a word of a tokenizer that splits texts into words itself."""
        return (
            self.is_byte_level
            or token.count("▁") == len(token)
            or len(SENTENCEPIECE_TOKEN.pre_tokenize_str(token)) == 1
        )

    def pieces(self, word: str) -> list[int]:
        return [token.id for token in self.backend.model.tokenize(word)]


def extend_vocabulary(tokenizer: PreTrainedTokenizerBase, documents: Iterable[str], num_tokens: int) -> Extension:
    """Continue the tokenizer's byte-pair encoding on `documents` by `num_tokens` merges.

    Old tokens keep their ids; the new ones follow the largest. Each new token is encoded once to prove that it is
    reached.

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
        raise DataError(
            f"the text is too little for {num_tokens:,} new tokens: it has only {len(merges):,} pairs that occur"
            " twice. Give more text, or ask for fewer."
        )
    counts = Counter[int]()
    for word, count in words.items():
        for token in backend.model.tokenize(word):
            counts[token.id] += count
    extended = copy.deepcopy(tokenizer)
    extended.backend_tokenizer.model = backend.model
    return Extension(
        extended, [NewToken(one.id, one.token, backend.decode([one.id]), one.pieces, counts[one.id]) for one in merges]
    )


def read_bpe(tokenizer: PreTrainedTokenizerBase) -> Bpe:
    """Read a tokenizer whose merges can be continued.

    Raises:
        RecipeError: it is no byte-pair encoding, or one of a kind whose merges cannot be continued, with the reason.
    """
    whose = f"the tokenizer of `{tokenizer.name_or_path}`"
    if not tokenizer.is_fast:
        raise RecipeError(
            f"{whose} is not a fast one ({type(tokenizer).__name__}), which gives no merges to continue."
        )
    backend = tokenizer.backend_tokenizer
    content = json.loads(backend.to_str())
    model = content["model"]
    if model["type"] != "BPE":
        why = WHY_NOT.get(model["type"], "it has no merges to continue")
        only = "Only byte-pair encodings (GPT-2, Llama, Qwen, Mistral, ...) can be extended."
        raise RecipeError(f"{whose} is {model['type']}: {why}. {only}")
    if model.get("dropout"):
        raise RecipeError(
            f"{whose} drops merges at random (dropout {model['dropout']}). Set it to null in tokenizer.json."
        )
    for key in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key):
            raise RecipeError(f"{whose} marks the parts of words (`{key}`: {model[key]!r}). Choose another model.")
    is_byte_level = '"ByteLevel"' in json.dumps(content["pre_tokenizer"])
    return Bpe(backend, content, backend.get_vocab(with_added_tokens=True), is_byte_level)


def learn_reachable(bpe: Bpe, words: Mapping[str, int], num_tokens: int) -> tuple[list[Merge], Tokenizer]:
    """Learn merges, and return them with the tokenizer that has them.

    The merges alone make every token reachable; only encoding a text shows that the words of some text lead there. A
    token that is not reached is forbidden, and the merges are learned again.
    """
    tokens = {number: token for token, number in bpe.vocabulary.items()}
    unknown = bpe.content["model"]["unk_token"]
    whole = {number for number, token in tokens.items() if not BYTE.fullmatch(token) and token != unknown}
    encoded, counts, origins = [], [], []
    for word in sorted(word for word in words if len(word) <= MAX_WORD_CHARACTERS):
        for ids in parts_to_merge(bpe.pieces(word), whole):
            encoded.append(ids)
            counts.append(words[word])
            origins.append(word)
    forbidden = set(bpe.vocabulary)
    while True:
        merges = learn_merges(encoded, counts, tokens, num_tokens, max(tokens) + 1, forbidden, bpe.may_be_token)
        backend = with_merges(bpe, merges, tokens)
        unreached = {
            one.token
            for one in merges
            if not is_reached(backend, one.id, text_up_to(backend, origins[one.word], one.token))
        }
        if not unreached:
            return merges, backend
        forbidden |= unreached


def parts_to_merge(ids: Sequence[int], whole: Set[int]) -> Iterator[list[int]]:
    """The longest parts of a word that hold only whole characters: SentencePiece's bytes, and its unknown token, are
    not merged."""
    for is_whole, group in groupby(ids, whole.__contains__):
        if is_whole and len(part := list(group)) > 1:
            yield part


def text_up_to(backend: Tokenizer, word: str, token: str) -> str:
    """The text of a word up to the end of a token in it, as when the token was learned, with nothing behind it."""
    end = word.find(token) + len(token)
    return str(backend.decoder.decode([word[:end]])) if backend.decoder is not None else word[:end]


def with_merges(bpe: Bpe, merges: Iterable[Merge], tokens: Mapping[int, str]) -> Tokenizer:
    """The tokenizer with further merges at the end of its list."""
    content: dict[str, Any] = json.loads(json.dumps(bpe.content))
    vocabulary: dict[str, int] = content["model"]["vocab"]
    # An added token that is not in the model's own vocabulary gets the next free id when the file is read, which now
    # is a new token's.
    vocabulary |= {token["content"]: token["id"] for token in content["added_tokens"]}
    strings = dict(tokens)
    for one in merges:
        strings[one.id] = one.token
        vocabulary[one.token] = one.id
        content["model"]["merges"].append([strings[one.left], strings[one.right]])
    backend = Tokenizer.from_str(json.dumps(content))
    backend.encode_special_tokens = bpe.backend.encode_special_tokens
    return backend


def is_reached(backend: Tokenizer, number: int, *examples: str) -> bool:
    """True if encoding gives the token for its own text, for that text in a context, or for one of the examples.

    A part of a character has no text of its own: there only the merges are checked.
    """
    text = backend.decode([number], skip_special_tokens=False)
    if REPLACEMENT in text:
        return [one.id for one in backend.model.tokenize(backend.id_to_token(number) or "")] == [number]
    texts = (*(context.replace("@", text) for context in CONTEXTS), *examples)
    return any(number in backend.encode(one, add_special_tokens=False).ids for one in texts)


# --- learning merges --------------------------------------------------------------------------------


def learn_merges(
    words: Sequence[Sequence[int]],
    counts: Sequence[int],
    tokens: Mapping[int, str],
    num_merges: int,
    first_id: int,
    forbidden: Iterable[str],
    may_be_token: Callable[[str], bool],
) -> list[Merge]:
    """The `num_merges` next merges, or fewer where the words run out of pairs: always the most frequent pair.

    Args:
        words: ids that the tokenizer makes of each different word.
        counts: how often each word occurs in the text.
        tokens: id -> token, as the tokenizer writes it.
        first_id: of the first new token; the others follow.
        forbidden: strings that no new token may be, such as those that are tokens already.
        may_be_token: further conditions on the string of a new token.
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
        """The pair that occurs most often in the text, of equal ones that of the smallest ids; None at the end."""
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
