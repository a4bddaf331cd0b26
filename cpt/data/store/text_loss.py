"""Does a tokenizer give the text back? Its tokens are decoded and compared; special tokens in texts are counted."""

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from os.path import commonprefix

import numpy as np
from numpy.typing import NDArray

from cpt.errors import RecipeError

WARNED_SHARE = 0.001  # of characters: above it, a warning
UNRESTORED_SHARE = 0.02  # above it, bits per byte mean nothing
WORST_KEPT = 20
WORST_SHOWN = 5
# Systematic sampling: an excerpt per this many characters is 0.4 % of a text.
EXCERPT_CHARACTERS = 1000
CHARACTERS_PER_EXCERPT = 250_000
CONTROL = {"\n": "LINE FEED", "\r": "CARRIAGE RETURN", "\t": "TAB"}
FIRST_EXCERPTS = 32  # at least, of a shard's first batch of documents


@dataclass(frozen=True)
class TextLoss:
    """The characters that a tokenizer does not give back. Canonically equivalent texts (é, e + accent) are equal.

    Attributes:
        lost: encoded as nothing, so the tokens do not show that there was a character.
        unknown: encoded as the unknown token.
        changed: by the tokenizer's normaliser (lower case, NFKC, accents), or blanks that were added.
        worst: characters that are not given back, with their counts; at most 20.
    """

    compared: int = 0
    lost: int = 0
    unknown: int = 0
    changed: int = 0
    worst: dict[str, int] = field(default_factory=dict)

    @property
    def share(self) -> float:
        """The share of the compared characters that are not given back."""
        return (self.lost + self.unknown + self.changed) / max(1, self.compared)

    def add(self, other: "TextLoss") -> "TextLoss":
        worst = Counter(self.worst) + Counter(other.worst)
        return TextLoss(
            compared=self.compared + other.compared,
            lost=self.lost + other.lost,
            unknown=self.unknown + other.unknown,
            changed=self.changed + other.changed,
            worst=dict(worst.most_common(WORST_KEPT)),
        )

    def __str__(self) -> str:
        counts = {"lost": self.lost, "unknown": self.unknown, "changed": self.changed}
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in counts.items() if count)
        worst = Counter(self.worst).most_common(WORST_SHOWN)
        named = ", ".join(f"{count:,} x {name_of(character)}" for character, count in worst)
        return f"{self.share:.2%} of {self.compared:,} compared characters ({kinds}; {named})"


def name_of(character: str) -> str:
    """Such as `U+0434 CYRILLIC SMALL LETTER DE`."""
    name = CONTROL.get(character) or unicodedata.name(character, "(no name)")
    return f"U+{ord(character):04X} {name}"


def total_loss(losses: Iterable[TextLoss | None]) -> TextLoss | None:
    """The sum; None if nothing was compared."""
    total: TextLoss | None = None
    for loss in losses:
        if loss is not None:
            total = loss if total is None else total.add(loss)
    return total


def excerpts(texts: Sequence[str], at_least: int = 1) -> list[str]:
    """Excerpts at equal distances in the concatenated texts, or the texts themselves if they are short."""
    lengths = np.fromiter(map(len, texts), np.int64, len(texts))
    ends = lengths.cumsum()
    total = int(lengths.sum())
    number = max(total // CHARACTERS_PER_EXCERPT, at_least)
    if total <= number * EXCERPT_CHARACTERS:
        return list(texts)
    positions = evenly_spaced(number, total)
    numbers = np.searchsorted(ends, positions, side="right")  # of the texts
    starts = positions - (ends - lengths)[numbers]
    excerpts = []
    for number, start in zip(numbers.tolist(), starts.tolist(), strict=True):
        excerpts.append(texts[number][start : start + EXCERPT_CHARACTERS])
    return excerpts


def evenly_spaced(number: int, total: int) -> NDArray[np.int64]:
    """The middles of `number` equal parts of a range."""
    return (2 * np.arange(number) + 1) * total // (2 * number)


def compare(text: str, decoded: str, normalised: str, *, has_unknown: bool) -> TextLoss:
    """Compare a text with the decoded text.

    Args:
        normalised: the output of the tokenizer's normaliser for the text, to see what that changed.
        has_unknown: the unknown token was among the tokens; it is not in `decoded`.
    """
    expected = Counter(canonical(text))
    restored = Counter(canonical(decoded))
    normal = Counter(canonical(normalised.replace("▁", " ")))
    missing = expected - restored
    changed = (missing & (expected - normal)).total()
    added_blanks = max(0, (restored - expected)[" "] - missing.total())
    gone = missing.total() - changed
    worst = missing + Counter({" ": added_blanks})
    return TextLoss(
        compared=len(text),
        lost=0 if has_unknown else gone,
        unknown=gone if has_unknown else 0,
        changed=changed + added_blanks,
        worst=dict(worst.most_common(WORST_KEPT)),
    )


def check_text_loss(
    name: str, tokenizer: str, loss: TextLoss | None, max_share: float
) -> list[str]:
    """A warning if the tokenizer does not give back the texts of a source; RecipeError above this share of them."""
    if loss is None or loss.share <= WARNED_SHARE:
        return []
    problem = f"{name}: the tokenizer `{tokenizer}` does not give the text back: {loss}"
    if loss.share <= max_share:
        return [problem]
    remedies = []
    if loss.lost + loss.unknown > loss.changed:
        remedies.append(
            "add the characters in Python: `tokenizer.add_tokens(list(CHARACTERS))`,"
            " `tokenizer.save_pretrained(FOLDER)`, then `tokenizer.path: FOLDER` and `model.resize_embeddings: true`"
        )
    accepted = math.ceil(1000 * loss.share) / 1000
    remedies += [
        "use a model whose tokenizer does (compare: cpt tokenizer report MODEL --text FILES)",
        f"or accept it: `data.max_text_loss: {accepted}`; its bits per byte are not reported",
    ]
    raise RecipeError(f"{problem}. Either {'; '.join(remedies)}.")


def spelled_warnings(
    name: str, counts: Mapping[str, int], first: str, texts: str = "the texts"
) -> list[str]:
    """A warning of special tokens in texts. They are encoded as text, but were probably meant as tokens."""
    if not counts:
        return []
    most_common = Counter(counts).most_common(WORST_SHOWN)
    dropped = re.escape(most_common[0][0])
    tokens = ", ".join(f"{count:,} x `{token}`" for token, count in most_common)
    return [
        f"{name}: special tokens are spelled in {texts}: {tokens}; first in {first}. They are learned as text."
        f" If they are no part of it, drop such documents: `data.filters: [{{name: pattern, drop: '{dropped}'}}]`;"
        " to split or clean them: docs/howto/preparing_data.md"
    ]


def canonical(text: str) -> str:
    """For comparisons; SentencePiece adds a blank to the beginning of a text, or takes one away."""
    return unicodedata.normalize("NFC", text.lstrip(" "))


SEPARATOR = b"\xff"  # in no UTF-8, so no token reaches from one text into the next


class SpelledTokens:
    """Counts special tokens that are spelled in texts, where they are text."""

    def __init__(self, tokens: Iterable[str]) -> None:
        self.counts = Counter[str]()
        groups = groupby(sorted({token for token in tokens if len(token) > 1}), first_of)
        self.alike = [TokensAlike(list(group)) for _, group in groups]

    def count(self, texts: Sequence[bytes]) -> int | None:
        """Count those in some texts; the number of the first text that has one."""
        joined = SEPARATOR.join(texts)
        begins = list[int]()
        for tokens in self.alike:
            for match in tokens.find(joined):
                self.counts[match[0].decode()] += 1
                begins.append(match.start())
        return joined.count(SEPARATOR, 0, min(begins)) if begins else None


class TokensAlike:
    """Special tokens with the same first character."""

    def __init__(self, tokens: Sequence[str]) -> None:
        self.pattern = re.compile(pattern_of(tokens).encode())
        raw = [token.encode() for token in tokens]
        self.start = commonprefix(tokens).encode()[:2]
        # Whether a byte is the first of any of them, the second, and so on.
        self.possible = np.zeros((min(map(len, raw)), 256), bool)
        for token in raw:
            self.possible[np.arange(len(self.possible)), list(token[: len(self.possible)])] = True

    def find(self, joined: bytes) -> Iterator[re.Match[bytes]]:
        """The tokens in texts, without overlaps. Comparing bytes is several times faster than the pattern."""
        if self.start[0] not in joined:
            return
        if len(self.start) == 2 and not has_pair(joined, self.start):
            return
        codes = np.frombuffer(joined, np.uint8)
        begins = np.flatnonzero(codes == self.start[0])
        for distance, is_possible in enumerate(self.possible):
            begins = begins[is_possible[codes.take(begins + distance, mode="clip")]]
        end = 0
        for begin in begins.tolist():
            match = self.pattern.match(joined, begin) if begin >= end else None
            if match is not None:
                end = match.end()
                yield match


def has_pair(text: bytes, pair: bytes) -> bool:
    """Like `pair in text`, several times as fast."""
    for offset in (0, 1):
        pairs = np.frombuffer(text, np.uint16, (len(text) - offset) // 2, offset)
        if (pairs == np.frombuffer(pair, np.uint16)).any():
            return True
    return False


def first_of(token: str) -> str:
    return token[:1]


def pattern_of(tokens: Sequence[str]) -> str:
    """A regular expression for sorted tokens, the longest match first; shared prefixes are compared once."""
    start = commonprefix(tokens)
    rest = [token[len(start) :] for token in tokens]
    endings = [pattern_of(list(group)) for _, group in groupby(filter(None, rest), first_of)]
    if not endings:
        return re.escape(start)
    optional = "?" if "" in rest else ""
    return f"{re.escape(start)}(?:{'|'.join(endings)}){optional}"
