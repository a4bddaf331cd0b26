"""Learn further merges on top of those that a tokenizer has: the pairs that stay most often beside each other in a
text.

Every new merge ranks behind all old ones. An old merge joins old tokens only, and a new merge leaves no new pair of
old tokens behind, so a text is first encoded exactly as before and then merged further: no input gets longer. And a
token that was learned as the result of its merges in a word is also what these merges make of its own string, since
none of them crossed its borders: none is unreachable.
"""

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

MAX_TOKEN_CHARACTERS = 32  # a longer token is a line of signs or one file's phrase
MIN_COUNT = 2  # what was seen once is no pattern

Pair = tuple[int, int]


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
