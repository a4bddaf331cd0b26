"""What a practitioner would choose for these documents, this model and this machine, by rules with sources."""

import math
from dataclasses import dataclass
from typing import Literal

from cpt.errors import DataError, ResourceError
from cpt.init.base_model import BaseModel
from cpt.init.documents import DocumentFacts, TokenEstimate
from cpt.init.memory import Fit, Method, fit, has_host, ways_to_train, with_micro_batch
from cpt.planner.compiling import FEWEST_STEPS as STEPS_WORTH_COMPILING
from cpt.planner.speed import MFU_RANGE, assumed_mfu
from cpt.planner.target import Target

Shift = Literal["weak", "strong"]
LONGEST_ROW, LONGEST_ROW_ON_CPU = 4096, 512
SHIFT_BELOW = 0.75  # of English's bytes per token
WEAK_REPLAY, STRONG_REPLAY = 0.05, 0.25
EPOCHS = ((500_000_000, 1), (50_000_000, 2), (0, 4))  # up to 4 are nearly as good as new text: arXiv 2305.16264
STEPS_WANTED, FEWEST_STEPS_AT_ALL = 400, 10
LARGEST_BATCH = 524_288
RATES_BY_SIZE = ((200_000_000, 1e-4), (1_000_000_000, 5e-5), (5_000_000_000, 2e-5), (math.inf, 1e-5))
REWARMED_TO = 0.3  # of the peak, for a strong shift: between where runs end, a tenth, and all of it, as in arXiv 2403.08763, which forgets more  # noqa: E501
ALL_PARAMETERS = "training all parameters"
LORA_FACTOR, LARGEST_LORA_RATE, LEAST_RATE = 10, 5e-4, 1e-6
WARMUP_SHARE = 0.01
HELD_OUT_DOCUMENTS, MOST_HELD_OUT, LEAST_HELD_OUT = 100, 0.2, 0.005
MOST_EVALUATIONS, EVALUATION_SHARE = 5, 0.1


@dataclass(frozen=True)
class Rate:
    """A learning rate and where it comes from."""

    value: float
    reason: str


@dataclass(frozen=True)
class Cost:
    """Hours on the target, at the assumed and at the published ends of efficiency."""

    hours: float
    low: float
    high: float
    mfu: float
    """Assumed share of the peak."""


@dataclass(frozen=True)
class Choices:
    """All that the recipe says, apart from the words."""

    fit: Fit
    refused: list[str]
    """Ways to train that were better and do not fit, each with what it needs."""
    sequence_length: int
    is_strong_shift: bool
    shift_reason: str
    replay: float
    """Share of the tokens; 0 where the user wants none."""
    epochs: float
    tokens: int
    batch_tokens: int
    rate: Rate
    embedding_rate: float | None
    warmup_tokens: int
    held_out_share: float
    evaluations: int
    """After training began."""
    cost: Cost

    @property
    def nearest_refused(self) -> str:
        """Of the ways to train all parameters that do not fit, the last that was tried, which needs the least of the
        GPU."""
        return next((told for told in reversed(self.refused) if told.startswith(ALL_PARAMETERS)), "")

    @property
    def steps(self) -> int:
        """Optimizer steps of the run."""
        return math.ceil(self.tokens / self.batch_tokens)


def choose(
    facts: DocumentFacts,
    estimate: TokenEstimate,
    base: BaseModel,
    target: Target,
    *,
    with_replay: bool = True,
    tokens: int | None = None,
    full: bool | None = None,
    shift: Shift | None = None,
) -> Choices:
    """Decide everything.

    Args:
        tokens: the budget, where the user has one.
        full: train all parameters, or with False adapters, whatever the rules say.
        shift: how far the documents are from what the base read, where the user knows.

    Raises:
        ResourceError: nothing fits the machine.
        DataError: there is too little text for a handful of steps.
    """
    length = row_length(base, target)
    strong, reason = (shift == "strong", "as you say") if shift is not None else judged_shift(facts, estimate)
    replay = (STRONG_REPLAY if strong else WEAK_REPLAY) if with_replay else 0.0
    held_out = held_out_share(facts.documents)
    epochs, budget = length_of_run(estimate.tokens * (1 - held_out), replay, tokens)
    is_short = budget < STEPS_WORTH_COMPILING * length * max(1, target.gpus)
    chosen, refused = method_that_fits(base, target, length, full, is_short)
    chosen, batch = batches(chosen, length, target, budget, base)
    if budget < FEWEST_STEPS_AT_ALL * batch:
        raise DataError(
            f"{facts.source.path}: its {estimate.tokens:,} tokens make {budget // batch} steps of {batch:,} tokens,"
            " too few to learn from. Give more documents, or --tokens for more times through these."
        )
    rate = learning_rate(base, chosen.method, strong)
    embedding_rate = rate.value / LORA_FACTOR if chosen.method.name == "lora" else None
    warmup = max(batch, round_down(WARMUP_SHARE * budget))
    return Choices(
        chosen,
        refused,
        length,
        strong,
        reason,
        replay,
        epochs,
        budget,
        batch,
        rate,
        embedding_rate,
        warmup,
        held_out,
        evaluations(held_out * estimate.tokens, budget),
        cost_of(target, chosen, budget),
    )


def row_length(base: BaseModel, target: Target) -> int:
    """As the base had it, or 4096 where it had more or nobody knows."""
    longest = LONGEST_ROW_ON_CPU if target.on_cpu else LONGEST_ROW
    trained = base.known.sequence_length if base.known else None
    return min(longest, trained or longest, base.longest_row or longest)


def method_that_fits(
    base: BaseModel, target: Target, length: int, full: bool | None, is_short: bool = False
) -> tuple[Fit, list[str]]:
    """The first way that fits, and why those before it do not."""
    refused: list[str] = []
    for method in ways_to_train(base, target, length, is_short=is_short):
        if full is not None and full != (method.name == "full"):
            continue
        if (found := fit(method, base, target, length)) is not None:
            return found, refused
        refused.append(why_not(method, target))
    if not refused:
        raise ResourceError(f"{base.path} has no linear layers that adapters could be put on. Leave out --lora.")
    raise ResourceError(
        f"{base.path} ({size_in_words(base.parameters)}) does not fit {target.name} x {max(1, target.gpus)}:"
        f" {'; '.join(refused)} (estimates). Take a smaller model, more GPUs (--gpus), larger ones, or say how much"
        " memory the host has (--host-memory GIB)."
    )


def why_not(method: Method, target: Target) -> str:
    """What a way to train would need."""
    what = {"full": ALL_PARAMETERS, "lora": "LoRA with embeddings and head", "adapters": "LoRA"}[method.name]
    how = f" with {method.profile}" if method.profile else ""
    if not has_host(method, target):
        return (
            f"{what}{how} needs {method.host_gib:.0f} GiB of host memory, there is {target.host_memory_gib:.0f}"
            f" ({target.host_source})"
        )
    return f"{what}{how} needs {method.states_gib:.1f} GiB before the first token, of {target.memory_gib:.0f}"


def judged_shift(facts: DocumentFacts, estimate: TokenEstimate) -> tuple[bool, str]:
    """How far the documents are from what the base read, judged by how well its tokenizer fits them."""
    told = (
        f"{estimate.bytes_per_token:.2f} bytes a token, {100 * estimate.compared_with_english:.0f} % of plain English"
        " under this tokenizer"
    )
    if facts.main_language not in (None, "en") and estimate.compared_with_english < 1:
        return True, f"most documents look like `{facts.main_language}`; {told}"
    return estimate.compared_with_english < SHIFT_BELOW, told


def length_of_run(domain_tokens: float, replay: float, asked: int | None) -> tuple[float, int]:
    """How often the documents are gone through, and the budget with the replay."""
    if asked is not None:
        return asked * (1 - replay) / max(1.0, domain_tokens), asked
    epochs = next(times for least, times in EPOCHS if domain_tokens >= least)
    return epochs, max(1, round_down(epochs * domain_tokens / (1 - replay)))


def batches(chosen: Fit, length: int, target: Target, budget: int, base: BaseModel) -> tuple[Fit, int]:
    """Tokens in a step: a power of two of rows, so that there are steps enough, and no more than the base took."""
    gpus = max(1, target.gpus)
    micro_batch = chosen.micro_batch if base.packs_documents else 1  # else a row is a batch by itself
    fewest = STEPS_WANTED if target.on_cpu else STEPS_WORTH_COMPILING  # a CPU is as fast with few rows at once
    while micro_batch > 1 and budget / (micro_batch * length * gpus) < fewest:
        micro_batch //= 2
    at_once = micro_batch * length * gpus
    most = min(LARGEST_BATCH, base.known.batch_tokens or LARGEST_BATCH) if base.known else LARGEST_BATCH
    wanted = min(most, budget / STEPS_WANTED)
    batch = at_once * 2 ** max(0, math.floor(math.log2(wanted / at_once))) if wanted > at_once else at_once
    return with_micro_batch(chosen, micro_batch), batch


def learning_rate(base: BaseModel, method: Method, is_strong_shift: bool) -> Rate:
    """Where the base's own schedule ended, for text that is far from what it read up again; ten times that for
    adapters."""
    known = base.known
    if known and is_strong_shift and known.peak_learning_rate:
        value = known.peak_learning_rate * REWARMED_TO
        reason = (
            f"{REWARMED_TO:g} of the base's own peak, {known.peak_learning_rate:g} ({known.source}): far from what it"
            " read, up again"
        )
    elif known and known.final_learning_rate and known.final_learning_rate >= LEAST_RATE:
        value, reason = (
            known.final_learning_rate,
            f"the learning rate at which the base's own training ended ({known.source})",
        )
    elif known and known.peak_learning_rate:
        value, reason = (
            known.peak_learning_rate / 10,
            f"a tenth of the base's own peak, {known.peak_learning_rate:g} ({known.source})",
        )
    else:
        value = next(rate for size, rate in RATES_BY_SIZE if base.parameters < size)
        part = "a tenth"
        if is_strong_shift:
            value, part = 10 * REWARMED_TO * value, f"{REWARMED_TO:g}"
        reason = (
            f"about {part} of the peaks published for {size_in_words(base.parameters)}; the base's own is not known"
            " here"
        )
    if method.name == "full":
        return Rate(value, reason)
    adapters = min(value * LORA_FACTOR, LARGEST_LORA_RATE)
    return Rate(
        adapters,
        "adapters want about ten times what all parameters do (swept up to 5e-4: arXiv 2405.09673); that is"
        f" {value:g}, {reason}",
    )


def size_in_words(parameters: int) -> str:
    """`8B parameters`."""
    return (
        f"{parameters / 1e9:.2g}B parameters"
        if parameters >= 1e9
        else f"{round(parameters, 2 - len(str(parameters))) / 1e6:g}M parameters"
    )


def held_out_share(documents: int) -> float:
    """Enough to judge by, and no more than a fifth."""
    share = min(MOST_HELD_OUT, max(LEAST_HELD_OUT, HELD_OUT_DOCUMENTS / documents))
    return math.ceil(share * 1000) / 1000


def evaluations(held_out_tokens: float, budget: int) -> int:
    """How often the held-out documents are read: so that it takes about a tenth of the time, since reading costs a
    third of learning."""
    return min(MOST_EVALUATIONS, max(1, int(3 * EVALUATION_SHARE * budget / max(1.0, held_out_tokens))))


def cost_of(target: Target, chosen: Fit, tokens: int) -> Cost:
    """Time at a share of the peak that others have reached; evaluation and saving come on top."""
    assumed = assumed_mfu(chosen.setup)
    expected, fast, slow = (chosen.hours(target, tokens, mfu) for mfu in (assumed, MFU_RANGE[1], MFU_RANGE[0]))
    return Cost(expected, fast, slow, assumed)


def round_down(number: float, digits: int = 2) -> int:
    """To so many digits that count: 1,234,567 becomes 1,200,000."""
    if number < 10**digits:
        return math.floor(number)
    step = 10 ** (math.floor(math.log10(number)) - digits + 1)
    return math.floor(number / step) * step
