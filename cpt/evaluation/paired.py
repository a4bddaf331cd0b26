"""The losses of each document, and the difference of two models on the same documents or questions, with a confidence
interval.

Both models get the same items, so differences are taken item by item: this removes the variance of items that are hard
for both (arxiv.org/abs/2411.00640, section 4). Items must be independent; questions about one document are not, so use
one per document.
"""

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from statistics import NormalDist
from typing import Any, Literal
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from cpt.errors import CheckpointError, DataError
from cpt.files import write_atomic
from cpt.runs.folder import HELD_OUT

LEVEL = 0.95  # confidence level of every interval
NORMAL_QUANTILE = NormalDist().inv_cdf((1 + LEVEL) / 2)
FEWEST = 2
FEW = 20  # with fewer documents, the report mentions it
TOO_FEW = 7  # with fewer documents the result is unknown: skewed changes mislead too often
FEW_TO_EXCLUDE = 8  # with at most this many documents, "no change found" would promise too much
MOST_FOR_SKEWNESS = 2.0  # limit of Hall's quantile, in multiples of Student's
NEGLIGIBLE = 0.02  # share of bits per byte or of a score; for accuracies, 2 points
DOMINANT = 0.25  # share of the bytes in one document
POWER = 0.8  # chance that the advised number of documents decides
EXAMPLES = 3  # worst documents and lost questions that are shown

Outcome = Literal[
    "better",
    "worse",
    "better, negligible",
    "worse, negligible",
    "no change found",
    "unknown",
]

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class DocumentLosses:
    """The losses of one model on one set; the arrays have one item per document, in the set's order."""

    hashes: NDArray[np.uint64]  # xxh3-64 of the text, which identifies documents across tokenizers
    num_bytes: NDArray[np.int64]  # UTF-8 bytes of the text
    nats: NDArray[np.float64]  # negative log-likelihood of the document
    num_tokens: NDArray[np.int64]  # predicted tokens
    num_correct: NDArray[np.int64]  # tokens predicted correctly (argmax)

    def metrics(self) -> dict[str, Any]:
        tokens = int(self.num_tokens.sum())
        loss = float(self.nats.sum() / tokens)  # nats per token
        return {
            "loss": loss,
            "perplexity": math.exp(loss) if loss < 700 else math.inf,  # avoid an overflow
            "bits_per_byte": float(self.nats.sum() / math.log(2) / self.num_bytes.sum()),
            "accuracy": float(self.num_correct.sum() / tokens),
            "tokens": tokens,
        }


def saved_losses(run_folder: Path) -> dict[int, Path]:
    """Step -> file of saved losses, in order."""
    paths = {}
    for path in (run_folder / HELD_OUT).glob("step-*.npz"):
        step = path.stem.removeprefix("step-")
        if step.isdecimal():
            paths[int(step)] = path
    return dict(sorted(paths.items()))


def save_losses(path: Path, losses: Mapping[str, DocumentLosses]) -> None:
    arrays = {}
    for number, of_set in enumerate(losses.values()):
        for name, values in vars(of_set).items():
            arrays[f"{number}.{name}"] = values
    content = BytesIO()
    np.savez(content, names=np.array(list(losses), dtype=np.str_), **arrays)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, content.getvalue())


def load_losses(path: Path) -> dict[str, DocumentLosses]:
    """Read a file written by `save_losses`; raises CheckpointError if it is damaged."""
    names = [field.name for field in fields(DocumentLosses)]
    losses = {}
    try:
        with np.load(path, allow_pickle=False) as arrays:
            for number, set_name in enumerate(arrays["names"]):
                values = [arrays[f"{number}.{name}"] for name in names]
                losses[str(set_name)] = DocumentLosses(*values)
    except (
        OSError,
        ValueError,
        KeyError,
        EOFError,
        BadZipFile,
        RuntimeError,
        zlib.error,
    ) as problem:
        raise CheckpointError(
            f"{path} is damaged ({problem}). Evaluate the model again: cpt evaluate MODEL."
        ) from problem
    return losses


def in_both(before: DocumentLosses, after: DocumentLosses) -> tuple[DocumentLosses, DocumentLosses]:
    """The same documents of two measurements of a set, if it changed between them, as by a new version of cpt."""
    if np.array_equal(before.hashes, after.hashes):
        return before, after
    _, indexes, indexes_after = np.intersect1d(before.hashes, after.hashes, return_indices=True)
    return select(before, indexes), select(after, indexes_after)


def select(losses: DocumentLosses, indexes: NDArray[np.int64]) -> DocumentLosses:
    return DocumentLosses(*(values[indexes] for values in vars(losses).values()))


@dataclass(frozen=True)
class RelativeChange:
    """A relative change with its confidence interval; 0.03 is 3 % more bits."""

    change: float
    low: float
    high: float

    @property
    def percents(self) -> tuple[float, float, float]:
        return 100 * self.change, 100 * self.low, 100 * self.high

    @property
    def direction(self) -> int:
        """1 if the interval is above 0, -1 if it is below, else 0."""
        if self.low > 0:
            return 1
        if self.high < 0:
            return -1
        return 0


@dataclass(frozen=True)
class LongDocuments:
    """The longest document if it has more than `DOMINANT` of the bytes, else the longest ones with half of them."""

    documents: int
    share: float  # of the bytes
    change: float  # of their bits together; 0.03 is 3 % more


@dataclass(frozen=True)
class Difference:
    """A metric on the same items before and after, with the confidence interval of the difference."""

    before: float
    after: float
    difference: float  # after - before
    low: float
    high: float
    items: int  # documents or questions
    negligible: float = 0.0  # smaller changes count as zero; in the unit of the difference
    num_worse: int | None = None  # documents with more bits than before
    largest_share: float | None = None  # share of the bytes in the largest document
    typical: RelativeChange | None = None  # of one document: exp(mean of log(after / before)) - 1
    long_documents: LongDocuments | None = None

    @property
    def decides(self) -> RelativeChange:
        """The direction by the documents, each counted once, if there are any; else by the difference."""
        return self.typical or self.of_all

    @property
    def of_all(self) -> RelativeChange:
        """The difference relative to the value before: of held-out text, the change of all bytes together."""
        unit = abs(self.before) or 1.0
        return RelativeChange(self.difference / unit, self.low / unit, self.high / unit)

    @property
    def margin(self) -> float:
        """The negligible change, relative to the value before."""
        return self.negligible / (abs(self.before) or 1.0)

    @property
    def is_dominated(self) -> bool:
        """Whether one document has enough of the bytes to decide their change alone."""
        return self.largest_share is not None and self.largest_share > DOMINANT

    @property
    def is_clear(self) -> bool:
        return self.outcome() not in ("no change found", "unknown")

    @property
    def is_on_few(self) -> bool:
        return self.items < FEW

    def outcome(self, *, higher_is_better: bool = False) -> Outcome:
        """The conclusion from the interval. It is "unknown" only of few items, or of documents that do not agree while
        one of them has much of the bytes."""
        if self.items < TOO_FEW:
            return "unknown"
        if not math.isfinite(self.after):
            return "worse"
        decides = self.decides
        may_matter = max(abs(decides.low), abs(decides.high)) > self.margin
        if decides.direction == 0:
            if may_matter and (self.items <= FEW_TO_EXCLUDE or self.is_dominated):
                return "unknown"
            return "no change found"
        is_better = (decides.direction > 0) == higher_is_better
        if may_matter:
            return "better" if is_better else "worse"
        return "better, negligible" if is_better else "worse, negligible"


def bits_per_byte_difference(
    before: Sequence[DocumentLosses],
    after: Sequence[DocumentLosses],
    weights: Sequence[float] | None = None,
) -> Difference:
    """Difference of the bits per byte of several sets together, by their weights or equally. Both have the same sets
    in the same order; tokenizers may differ. Raises DataError for different documents, or fewer than two in a set."""
    of_bytes: list[Moments] = []
    of_documents: list[Moments] = []
    for old, new in zip(before, after, strict=True):
        if not np.array_equal(old.hashes, new.hashes):
            raise DataError(
                "the two models were measured on different documents. Evaluate both on the same files."
            )
        refuse_too_few(len(old.hashes), "documents")
        bits = (new.nats - old.nats) / math.log(2)
        of_bytes.append(moments_of_ratio(bits, old.num_bytes.astype(np.float64)))
        scored = (old.nats > 0) & (new.nats > 0)  # a document of one token has no loss
        if scored.sum() >= FEWEST:
            logs = np.log(new.nats[scored] / old.nats[scored])
            of_documents.append(moments_of_mean(logs))
    shares = np.ones(len(of_bytes)) if weights is None else np.array(weights, np.float64)
    shares /= shares.sum()
    old_bits = float(np.dot(shares, [losses.metrics()["bits_per_byte"] for losses in before]))
    new_bits = float(np.dot(shares, [losses.metrics()["bits_per_byte"] for losses in after]))
    low, high = weighted(of_bytes, shares).interval()
    typical = None
    if len(of_documents) == len(of_bytes):
        mean_log = weighted(of_documents, shares)
        log_low, log_high = mean_log.interval()
        typical = RelativeChange(
            math.expm1(mean_log.value), math.expm1(log_low), math.expm1(log_high)
        )
    nats = np.concatenate([losses.nats for losses in before])
    new_nats = np.concatenate([losses.nats for losses in after])
    num_bytes = np.concatenate([losses.num_bytes for losses in before])
    return Difference(
        before=old_bits,
        after=new_bits,
        difference=new_bits - old_bits,
        low=low,
        high=high,
        items=len(nats),
        negligible=NEGLIGIBLE * old_bits,
        num_worse=int((new_nats > nats).sum()),
        largest_share=float(num_bytes.max() / num_bytes.sum()),
        typical=typical,
        long_documents=long_documents(nats, new_nats, num_bytes),
    )


def long_documents(nats: Floats, new_nats: Floats, num_bytes: NDArray[np.int64]) -> LongDocuments:
    order = np.argsort(-num_bytes, kind="stable")
    shares = num_bytes[order].cumsum() / num_bytes.sum()
    count = 1
    if shares[0] <= DOMINANT:
        count = int(np.searchsorted(shares, 0.5)) + 1
    longest = order[:count]
    change = float(new_nats[longest].sum() / nats[longest].sum() - 1)
    return LongDocuments(count, float(shares[count - 1]), change)


def mean_difference(before: Floats, after: Floats) -> Difference:
    """Difference of the mean of a value per item, such as a task's score; DataError for fewer than two items."""
    if np.isin(np.concatenate([before, after]), (0, 1)).all():
        return accuracy_difference(before.astype(bool), after.astype(bool))
    refuse_too_few(len(before), "questions")
    moments = moments_of_mean(after - before)
    low, high = moments.interval()
    mean_before = float(before.mean())
    return Difference(
        before=mean_before,
        after=float(after.mean()),
        difference=moments.value,
        low=low,
        high=high,
        items=len(before),
        negligible=NEGLIGIBLE * abs(mean_before),
    )


@dataclass(frozen=True)
class Moments:
    """An estimate and the moments of its error."""

    value: float
    variance: float
    third: float
    degrees: float
    """Degrees of freedom of the variance."""

    def interval(self, level: float = LEVEL) -> tuple[float, float]:
        """Student's interval; each end is extended to that of Hall's transformation, which removes the skewness (Hall
        1992, doi.org/10.1111/j.2517-6161.1992.tb01876.x), if that is further out. `python -m benchmarks.verdict`
        simulates the coverage, and compares other intervals."""
        error = math.sqrt(self.variance)
        skewness = self.third / self.variance**1.5 if self.variance else 0.0
        reach = t_quantile(level, self.degrees)
        low = self.value - error * max(reach, hall(reach, skewness))
        high = self.value - error * min(-reach, hall(-reach, skewness))
        return float(low), float(high)


def weighted(parts: Sequence[Moments], shares: Floats) -> Moments:
    """The weighted mean of independent estimates, with Satterthwaite's degrees of freedom (1946,
    doi.org/10.2307/3002019)."""
    variances = [share**2 * part.variance for share, part in zip(shares, parts, strict=True)]
    variance = sum(variances)
    squares = 0.0
    for part_variance, part in zip(variances, parts, strict=True):
        squares += part_variance**2 / part.degrees
    return Moments(
        value=float(np.dot(shares, [part.value for part in parts])),
        variance=variance,
        third=float(np.dot(shares**3, [part.third for part in parts])),
        degrees=variance**2 / squares if squares else sum(part.degrees for part in parts),
    )


def moments_of_mean(values: Floats) -> Moments:
    count = len(values)
    residuals = values - values.mean()
    # Each residual has lost 1 / count of its variance to the mean.
    residuals = residuals / (count * math.sqrt(1 - 1 / count))
    variance = float((residuals**2).sum())
    third = float((residuals**3).sum())
    return Moments(float(values.mean()), variance, third, count - 1.0)


def moments_of_ratio(differences: Floats, sizes: Floats) -> Moments:
    """The moments of (sum of differences) / (sum of sizes), for documents of very unequal size.

    A few large documents decide most of such a ratio. The usual standard error is then too small, and there are fewer
    degrees of freedom than documents. We use the HC2 error with the degrees of freedom of Bell and McCaffrey (Imbens
    and Kolesar 2016, doi.org/10.1162/REST_a_00552).
    """
    total = float(sizes.sum())
    ratio = float(differences.sum() / total)
    residuals = differences - ratio * sizes
    residuals = (residuals - residuals.mean()) / np.sqrt(1 - sizes / total) / total
    degrees = float((sizes**2).sum() ** 2 / (sizes**4).sum())
    variance = float((residuals**2).sum())
    third = float((residuals**3).sum())
    return Moments(ratio, variance, third, max(1.0, degrees))


def refuse_too_few(number: int, items: str) -> None:
    if number < FEWEST:
        needs = f"an interval needs at least {FEWEST} {items}, {FEW} to be useful"
        raise DataError(f"{needs}; got {number}. Hold out more documents.")


def hall(quantile: float, skewness: float) -> float:
    """The quantile of a studentised sum with this skewness: the inverse of Hall's
    t + s t^2 / 3 + s^2 t^3 / 27 + s / 6."""
    if abs(skewness) < 1e-6:
        return quantile
    inverse = 3 / skewness * (math.cbrt(1 + skewness * (quantile - skewness / 6)) - 1)
    # If skewness x quantile is near -1, the inverse grows without bound.
    limit = MOST_FOR_SKEWNESS * abs(quantile)
    return max(-limit, min(limit, inverse))


@lru_cache
def t_quantile(level: float, degrees: float) -> float:
    """The quantile t, with this share of Student's distribution between -t and t; with t = sqrt(degrees) * tan(angle)
    its density is cos(angle)^(degrees - 1)."""
    angles = np.linspace(0, math.pi / 2, 200_001)
    density = np.cos(angles) ** (degrees - 1)
    share = np.concatenate([np.zeros(1), (density[1:] + density[:-1]).cumsum()])
    return math.sqrt(degrees) * math.tan(float(np.interp(level, share / share[-1], angles)))


def accuracy_difference(before: NDArray[np.bool_], after: NDArray[np.bool_]) -> Difference:
    """Difference of two accuracies on the same questions; DataError for fewer than two. Only questions that one model
    answers correctly and the other does not are informative, as in McNemar's test. It is Wald's interval after adding
    one such question to each side (Bonett and Price 2012, doi.org/10.3102/1076998611411915)."""
    number = len(before)
    refuse_too_few(number, "questions")
    won_share = (int((after & ~before).sum()) + 1) / (number + 2)
    lost_share = (int((before & ~after).sum()) + 1) / (number + 2)
    middle = won_share - lost_share
    reach = NORMAL_QUANTILE * math.sqrt((won_share + lost_share - middle**2) / (number + 2))
    return Difference(
        before=float(before.mean()),
        after=float(after.mean()),
        difference=float(after.mean() - before.mean()),
        low=max(-1.0, middle - reach),
        high=min(1.0, middle + reach),
        items=number,
        negligible=NEGLIGIBLE,
    )


def accuracy_interval(correct: NDArray[np.bool_]) -> tuple[float, float]:
    """Wilson's interval of an accuracy (doi.org/10.1080/01621459.1927.10502953), which also holds near 0 and 1."""
    number = len(correct)
    share = float(correct.mean())
    z = NORMAL_QUANTILE
    middle = (share + z**2 / (2 * number)) / (1 + z**2 / number)
    error = math.sqrt(share * (1 - share) / number + z**2 / (4 * number**2))
    reach = z / (1 + z**2 / number) * error
    return middle - reach, middle + reach


@dataclass(frozen=True)
class Transitions:
    lost: int
    """Questions that went from right to wrong."""
    won: int
    forgotten: tuple[float, float, float]
    """Share of all questions: estimate for independent guesses, and its 95 % interval."""
    learned: tuple[float, float, float]
    chance: float | None
    """Mean probability of a lucky guess; None if unknown: not corrected."""
    first_lost: list[str]

    def __str__(self) -> str:
        counts = f"{self.lost:,} right -> wrong, {self.won:,} wrong -> right"
        shares = f"forgotten {spread(self.forgotten)}, learned {spread(self.learned)}"
        if self.chance is None:
            return f"{counts}; {shares} (lucky guesses included)"
        guesses = f"lucky guesses ({100 * self.chance:.0f} % each)"
        if self.forgotten[1] == self.learned[1] == 0:
            return f"{counts}: no more than {guesses} can explain"
        return f"{counts}; beyond {guesses}: {shares}"


def spread(share: tuple[float, float, float]) -> str:
    """A share with its interval."""
    estimate, low, high = (100 * end for end in share)
    return f"{estimate:.1f} % (95 % interval {low:.1f} to {high:.1f} %)"


def transitions(
    before: NDArray[np.bool_],
    after: NDArray[np.bool_],
    chance: Floats | None,
    texts: Sequence[str] = (),
) -> Transitions:
    """Count and estimate forgetting and learning by question (arXiv 2510.17776), without transitions that are luck.

    Our model: a known answer is right. An unknown one is right with probability c, before and after; the second guess
    repeats the first with probability r. For r = 0, the mean over the questions of

        [right -> wrong] / (1 - c) - [wrong twice] * c / (1 - c)^2

    estimates P(known before, unknown after) without bias. For r = 1, as of nearly equal models, its first term does.
    The answers do not show r, so the interval reaches from the lower end for r = 0 to the upper end for r = 1. The
    ends are Wald's, with some imagined questions (Agresti and Coull 1998, doi.org/10.1080/00031305.1998.10480550).
    `tests/evaluation/test_paired.py` simulates the coverage.

    Args:
        chance: c of each question, such as 1 / choices; 0 for generated text; None if unknown, and taken as 0.
        texts: the questions, for `first_lost`.
    """
    # A question with one choice, which is always right, would divide by zero.
    c = np.zeros(len(before)) if chance is None else np.minimum(chance, 0.5)
    lost = before & ~after
    won = after & ~before
    wrong_twice = ~(before | after)
    lost_questions = np.flatnonzero(lost)[:EXAMPLES].tolist()
    return Transitions(
        lost=int(lost.sum()),
        won=int(won.sum()),
        forgotten=share_that_moved(lost, wrong_twice, c),
        learned=share_that_moved(won, wrong_twice, c),
        chance=None if chance is None else float(chance.mean()),
        first_lost=[texts[index] for index in lost_questions if index < len(texts)],
    )


def share_that_moved(
    moved: NDArray[np.bool_], wrong_twice: NDArray[np.bool_], c: Floats
) -> tuple[float, float, float]:
    """The share of questions that moved without luck, and its interval; see `transitions`."""
    repeated = moved / (1 - c)  # r = 1
    independent = repeated - wrong_twice * c / (1 - c) ** 2  # r = 0
    mean = float(c.mean())
    # The contribution of an imagined question that moved, or was wrong twice.
    moved_once = 1 / (1 - mean)
    lucky = -mean / (1 - mean) ** 2
    below = np.append(independent, (moved_once, lucky, 0))
    above = np.append(repeated, (moved_once, moved_once, 0, 0))
    low = below.mean() - NORMAL_QUANTILE * below.std() / math.sqrt(len(below))
    high = above.mean() + NORMAL_QUANTILE * above.std() / math.sqrt(len(above))
    share, low, high = np.clip([independent.mean(), low, high], 0, 1).tolist()
    return share, low, high
