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
# With fewer documents the result is unknown. For skewed differences the 95 % interval covers only 85 to 93 %, the
# 99 % interval about 95 %.
TOO_FEW = 7
MOST_FOR_SKEWNESS = 2.0  # limit of Hall's quantile, in multiples of Student's
NEGLIGIBLE = 0.02  # share of bits per byte or of a score; for accuracies, 2 points
NOTICEABLE = (
    0.05  # share of a negligible change: 0.1 % of bits per byte, to detect runs without effect
)
DOMINANT = 0.2  # share of the bytes in one document
EXAMPLES = 3  # worst documents and lost questions that are shown

Outcome = Literal["better", "worse", "about the same", "not worse", "not better", "unknown"]

Floats = NDArray[np.float64]
Stratum = tuple[Floats, Floats]  # difference and size of each document


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
            "accuracy": float(
                self.num_correct.sum() / tokens
            ),  # share of tokens predicted correctly
            "tokens": tokens,
        }


def saved_losses(run_folder: Path) -> dict[int, Path]:
    """Step -> file of saved losses, in order."""
    paths = {
        path.stem.removeprefix("step-"): path for path in (run_folder / HELD_OUT).glob("step-*.npz")
    }
    return dict(sorted((int(step), path) for step, path in paths.items() if step.isdecimal()))


def save_losses(path: Path, losses: Mapping[str, DocumentLosses]) -> None:
    arrays = {
        f"{number}.{field.name}": vars(of_set)[field.name]
        for number, of_set in enumerate(losses.values())
        for field in fields(of_set)
    }
    content = BytesIO()
    np.savez(content, names=np.array(list(losses), dtype=np.str_), **arrays)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, content.getvalue())


def load_losses(path: Path) -> dict[str, DocumentLosses]:
    """Read a file written by `save_losses`; raises CheckpointError if it is damaged."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return {
                str(name): DocumentLosses(
                    *(arrays[f"{number}.{field.name}"] for field in fields(DocumentLosses))
                )
                for number, name in enumerate(arrays["names"])
            }
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

    @property
    def is_clear(self) -> bool:
        """Whether the interval excludes 0, and the change may be large enough to notice."""
        return (
            self.items >= TOO_FEW
            and (self.low > 0 or self.high < 0)
            and max(-self.low, self.high) > NOTICEABLE * self.negligible
        )

    def outcome(self, *, higher_is_better: bool = False) -> Outcome:
        """The conclusion from the interval; "unknown" if it excludes neither a relevant gain nor a relevant loss, or
        with fewer than `TOO_FEW` items."""
        if self.items < TOO_FEW:
            return "unknown"
        low, high = (-self.high, -self.low) if higher_is_better else (self.low, self.high)
        if self.is_clear:
            return "better" if high < 0 else "worse"
        if high <= self.negligible:
            return "about the same" if low >= -self.negligible else "not worse"
        return "not better" if low >= -self.negligible else "unknown"

    @property
    def is_dominated(self) -> bool:
        """Whether one document decides much of the result; with very few documents, one always does."""
        return (
            self.largest_share is not None
            and self.largest_share > DOMINANT
            and self.items >= 2 / DOMINANT
        )

    @property
    def percents(self) -> tuple[float, float, float]:
        """Change, and both ends of its interval, in percent of the value before."""
        change, low, high = (
            100 * value / self.before for value in (self.difference, self.low, self.high)
        )
        return change, low, high

    @property
    def is_on_few(self) -> bool:
        return self.items < FEW


def bits_per_byte_difference(
    before: Sequence[DocumentLosses], after: Sequence[DocumentLosses]
) -> Difference:
    """Difference of the bits per byte of several sets together; each set is a stratum. Both have the same sets in the
    same order; tokenizers may differ. Raises DataError for different documents, or fewer than two in a set."""
    strata = []
    for old, new in zip(before, after, strict=True):
        if not np.array_equal(old.hashes, new.hashes):
            raise DataError(
                "the two models were measured on different documents. Evaluate both on the same files."
            )
        strata.append(((new.nats - old.nats) / math.log(2), old.num_bytes.astype(np.float64)))
    low, high = ratio_interval(strata)
    num_bytes = sum(int(losses.num_bytes.sum()) for losses in before)
    was, now = (
        sum(float(losses.nats.sum()) for losses in side) / math.log(2) / num_bytes
        for side in (before, after)
    )
    return Difference(
        *(was, now, now - was, low, high),
        items=sum(len(sizes) for _, sizes in strata),
        negligible=NEGLIGIBLE * was,
        num_worse=sum(int((differences > 0).sum()) for differences, _ in strata),
        largest_share=max(float(sizes.max()) for _, sizes in strata) / num_bytes,
    )


def mean_difference(before: Floats, after: Floats) -> Difference:
    """Difference of the mean of a value per item, such as a task's score; DataError for fewer than two items."""
    if np.isin(np.concatenate([before, after]), (0, 1)).all():
        return accuracy_difference(before.astype(bool), after.astype(bool))
    low, high = ratio_interval([(after - before, np.ones(len(before)))])
    was, now = float(before.mean()), float(after.mean())
    return Difference(
        was,
        now,
        float((after - before).mean()),
        low,
        high,
        len(before),
        negligible=NEGLIGIBLE * abs(was),
    )


def ratio_interval(strata: Sequence[Stratum]) -> tuple[float, float]:
    """The interval of (sum of differences) / (sum of sizes), for documents of very unequal size and skewed
    differences.

    A few large documents decide most of such a ratio. The usual standard error is then too small, and there are fewer
    degrees of freedom than documents. We use the HC2 error with the degrees of freedom of Bell and McCaffrey (Imbens
    and Kolesar 2016, doi.org/10.1162/REST_a_00552). Student's t still misses too often on the side of the long tail.
    So each end is extended to that of Hall's transformation, which removes the skewness (Hall 1992,
    doi.org/10.1111/j.2517-6161.1992.tb01876.x), if that is further out. Documents are drawn within their stratum
    (Cochran, Sampling Techniques, 1977, section 6.11). `tests/evaluation/test_paired.py` simulates the coverage.

    Raises:
        DataError: a stratum has fewer than two documents.
    """
    for differences, _ in strata:
        refuse_too_few(len(differences), "documents")
    ratio, error, degrees, skewness = ratio_and_error(strata)
    reach = t_quantile(0.99 if sum(len(own) for _, own in strata) < TOO_FEW else LEVEL, degrees)
    low, high = (
        ratio - error * extreme(quantile, hall(quantile, skewness))
        for quantile, extreme in ((reach, max), (-reach, min))
    )
    return low, high


def refuse_too_few(number: int, items: str) -> None:
    if number < FEWEST:
        needs = f"an interval needs at least {FEWEST} {items}, {FEW} to be useful"
        raise DataError(f"{needs}; got {number}. Hold out more documents.")


def ratio_and_error(strata: Sequence[Stratum]) -> tuple[float, float, float, float]:
    """The ratio, its standard error, the error's degrees of freedom, and the ratio's skewness; each stratum needs at
    least two documents."""
    sizes = np.concatenate([sizes for _, sizes in strata])
    ratio = float(sum(differences.sum() for differences, _ in strata) / sizes.sum())
    variance = third_moment = 0.0
    for differences, own in strata:
        residuals = differences - ratio * own
        residuals = (residuals - residuals.mean()) / np.sqrt(1 - own / sizes.sum())
        # Lost by subtracting the stratum's mean; 0 anyway for a single stratum.
        lost = 1.0 if len(strata) == 1 else 1 - 1 / len(own)
        variance += float((residuals**2).sum()) / lost
        third_moment += float((residuals**3).sum())
    degrees = float((sizes**2).sum() ** 2 / (sizes**4).sum())
    skewness = third_moment / variance**1.5 if variance else 0.0
    return ratio, math.sqrt(variance) / float(sizes.sum()), max(1.0, degrees), skewness


def hall(quantile: float, skewness: float) -> float:
    """The quantile of a studentised sum with this skewness: the inverse of Hall's
    t + s t^2 / 3 + s^2 t^3 / 27 + s / 6."""
    if abs(skewness) < 1e-6:
        return quantile
    found = 3 / skewness * (math.cbrt(1 + skewness * (quantile - skewness / 6)) - 1)
    # If skewness x quantile is near -1, the inverse grows without bound.
    return max(-MOST_FOR_SKEWNESS * abs(quantile), min(MOST_FOR_SKEWNESS * abs(quantile), found))


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
    won, lost = (int((new & ~old).sum()) + 1 for new, old in ((after, before), (before, after)))
    won_share, lost_share = won / (number + 2), lost / (number + 2)
    middle = won_share - lost_share
    reach = NORMAL_QUANTILE * math.sqrt((won_share + lost_share - middle**2) / (number + 2))
    was, now = float(before.mean()), float(after.mean())
    low, high = max(-1.0, middle - reach), min(1.0, middle + reach)
    return Difference(
        was, now, float(after.mean() - before.mean()), low, high, number, negligible=NEGLIGIBLE
    )


def accuracy_interval(correct: NDArray[np.bool_]) -> tuple[float, float]:
    """Wilson's interval of an accuracy (doi.org/10.1080/01621459.1927.10502953), which also holds near 0 and 1."""
    number, share, z = len(correct), float(correct.mean()), NORMAL_QUANTILE
    middle = (share + z**2 / (2 * number)) / (1 + z**2 / number)
    reach = (
        z / (1 + z**2 / number) * math.sqrt(share * (1 - share) / number + z**2 / (4 * number**2))
    )
    return middle - reach, middle + reach


@dataclass(frozen=True)
class Transitions:
    lost: int  # questions that went from right to wrong
    won: int
    forgotten: tuple[
        float, float, float
    ]  # share of all questions: estimate for independent guesses, 95 % interval
    learned: tuple[float, float, float]
    chance: float | None  # mean probability of a lucky guess; None if unknown: not corrected
    first_lost: list[str]

    def __str__(self) -> str:
        chance = (
            "unknown, so not corrected" if self.chance is None else f"{100 * self.chance:.0f} %"
        )
        forgotten, learned = (
            "{:.1f} % (95 % interval {:.1f} to {:.1f} %)".format(*(100 * value for value in share))
            for share in (self.forgotten, self.learned)
        )
        counts = f"{self.lost:,} right -> wrong, {self.won:,} wrong -> right"
        return (
            f"{counts}; forgotten {forgotten}, learned {learned}; chance of a lucky guess: {chance}"
        )


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
    c = (
        np.zeros(len(before)) if chance is None else np.minimum(chance, 0.5)
    )  # one choice is always right
    lost, won, wrong_twice = before & ~after, after & ~before, ~(before | after)
    return Transitions(
        lost=int(lost.sum()),
        won=int(won.sum()),
        forgotten=share_that_moved(lost, wrong_twice, c),
        learned=share_that_moved(won, wrong_twice, c),
        chance=None if chance is None else float(chance.mean()),
        first_lost=[
            texts[number] for number in np.flatnonzero(lost)[:EXAMPLES] if number < len(texts)
        ],
    )


def share_that_moved(
    moved: NDArray[np.bool_], wrong_twice: NDArray[np.bool_], c: Floats
) -> tuple[float, float, float]:
    repeated = moved / (1 - c)
    independent = repeated - wrong_twice * c / (1 - c) ** 2
    mean = float(c.mean())
    one, lucky = (
        1 / (1 - mean),
        -mean / (1 - mean) ** 2,
    )  # of an imagined question that moved, or was wrong twice
    below, above = np.append(independent, (one, lucky, 0)), np.append(repeated, (one, one, 0, 0))
    low, high = (
        NORMAL_QUANTILE * values.std() / math.sqrt(len(values)) for values in (below, above)
    )
    share, low, high = np.clip(
        [independent.mean(), below.mean() - low, above.mean() + high], 0, 1
    ).tolist()
    return share, low, high
