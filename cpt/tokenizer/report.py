"""How a tokenizer fits texts: bytes per token, tokens per word, and the part of its vocabulary that they use."""

import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from cpt.tokenizer.reachability import Unreachable, unreachable_tokens

WITHOUT_SPACES = {
    "Cjk",
    "Hiragana",
    "Katakana",
    "Thai",
    "Lao",
    "Khmer",
    "Myanmar",
    "Tibetan",
}  # a word there is a whole clause
NO_SCRIPT = "digits and signs"
SHOWN = 10
WORDS_AT_ONCE = 20_000
LONGEST_WORD = 60  # characters; what is longer is no word

Lengths = Callable[[Sequence[str]], NDArray[np.int64]]


@dataclass
class TextFigures:
    """A text under one tokenizer.

    Attributes:
        words: what stands between spaces.
        is_cut: there is more of it than was read.
    """

    name: str
    documents: int = 0
    bytes: int = 0
    words: int = 0
    tokens: int = 0
    is_cut: bool = False

    @property
    def bytes_per_token(self) -> float:
        """UTF-8 bytes; the higher, the more text in a row of the model."""
        return self.bytes / max(1, self.tokens)

    @property
    def fertility(self) -> float:
        """Tokens per word."""
        return self.tokens / max(1, self.words)


@dataclass
class ScriptFigures:
    """The words of one script, each with the space before it."""

    script: str
    words: int = 0
    bytes: int = 0
    tokens: int = 0


@dataclass(frozen=True)
class CostlyWord:
    """A word that takes many tokens, for how often it stands in the text."""

    word: str
    count: int
    tokens: int


@dataclass
class VocabularyFigures:
    """A tokenizer's vocabulary, and what the texts use of it.

    Attributes:
        regular: tokens that are neither special nor added.
        never_seen: those of them that stand nowhere in the texts, by id.
        longest: id and text.
        special: id and text of special and added tokens.
    """

    size: int
    regular: int
    never_seen: list[int]
    unreachable: list[Unreachable]
    longest: list[tuple[int, str]]
    special: list[tuple[int, str]]


@dataclass
class Figures:
    """One tokenizer under all texts; scripts and costly words are of a sample of their words."""

    tokenizer: str
    engine: str
    texts: list[TextFigures]
    scripts: list[ScriptFigures]
    costly: list[CostlyWord]
    vocabulary: VocabularyFigures | None = None
    notes: list[str] = field(default_factory=list)


def script_figures(words: Mapping[str, int], costs: Mapping[str, int]) -> list[ScriptFigures]:
    """Words, bytes and tokens by script, the most frequent first."""
    found: dict[str, ScriptFigures] = {}
    for word, count in words.items():
        one = found.setdefault(script := script_of(word), ScriptFigures(script))
        one.words += count
        one.bytes += count * (len(word.encode("utf-8", "surrogatepass")) + 1)
        one.tokens += count * costs[word]
    return sorted(found.values(), key=lambda one: -one.bytes)


def script_of(word: str) -> str:
    """Of a word's first letter, as Unicode names it: `Latin`, `Cyrillic`, `Cjk`."""
    for character in word:
        if character.isalpha():
            return unicodedata.name(character, NO_SCRIPT).split(" ", 1)[0].capitalize()
    return NO_SCRIPT


def costly_words(words: Mapping[str, int], costs: Mapping[str, int], number: int = SHOWN) -> list[CostlyWord]:
    """The words that would save most tokens if each were one."""
    spent = {word: count * (costs[word] - 1) for word, count in words.items() if len(word) <= LONGEST_WORD}
    worst = sorted(spent, key=lambda word: (-spent[word], word))[:number]
    return [CostlyWord(word, words[word], costs[word]) for word in worst if spent[word]]


def word_costs(words: Iterable[str], lengths: Lengths) -> dict[str, int]:
    """Tokens of each word, as it stands after another one.

    Args:
        lengths: how many tokens each of several texts has.
    """
    ordered, costs = list(words), dict[str, int]()
    for begin in range(0, len(ordered), WORDS_AT_ONCE):
        some = ordered[begin : begin + WORDS_AT_ONCE]
        costs |= zip(some, (lengths([f"a {word}" for word in some]) - lengths(["a"])).tolist(), strict=True)
    return costs


def vocabulary_figures(tokenizer: PreTrainedTokenizerBase, seen: NDArray[np.int64]) -> VocabularyFigures:
    """What the texts use of the vocabulary, and what no text can use.

    Args:
        seen: how often each id stands in the texts.
    """
    backend = tokenizer.backend_tokenizer
    added = {number: token.content for number, token in tokenizer.added_tokens_decoder.items()}
    regular = sorted(set(tokenizer.get_vocab().values()) - set(added))
    counts = Counter({number: int(seen[number]) for number in regular if number < len(seen) and seen[number]})
    decoded = sorted(
        ((backend.decode([number]), number) for number in regular), key=lambda item: (-len(item[0]), item[1])
    )
    return VocabularyFigures(
        size=len(tokenizer),
        regular=len(regular),
        never_seen=[number for number in regular if not counts[number]],
        unreachable=list(unreachable_tokens(backend, counts)),
        longest=[(number, text) for text, number in decoded[:SHOWN]],
        special=sorted(added.items()),
    )


def as_json(figures: Figures) -> dict[str, Any]:
    """The figures with ratios beside what they are of."""
    vocabulary = figures.vocabulary
    return {
        "tokenizer": figures.tokenizer,
        "engine": figures.engine,
        "texts": [
            {**vars(one), "bytes_per_token": one.bytes_per_token, "tokens_per_word": one.fertility}
            for one in figures.texts
        ],
        "scripts": [{**vars(one), "bytes_per_token": one.bytes / max(1, one.tokens)} for one in figures.scripts],
        "costly_words": [vars(one) for one in figures.costly],
        "vocabulary": None
        if vocabulary is None
        else {**vars(vocabulary), "unreachable": [vars(one) for one in vocabulary.unreachable]},
        "notes": figures.notes,
    }
