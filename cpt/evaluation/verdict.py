"""The verdict on a finished run: whether continued pre-training worked, what it cost, and what was not measured. As a
page and as a JSON file."""

import json
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment

from cpt.data.readers.columns import form_of_stage
from cpt.data.readers.decontamination import REASON
from cpt.data.rows.contamination import Contamination
from cpt.errors import CheckpointError
from cpt.evaluation.gain import Gain
from cpt.evaluation.kinds import domain_weights, general_sets
from cpt.evaluation.paired import (
    EXAMPLES,
    FEW_TO_EXCLUDE,
    LEVEL,
    NEGLIGIBLE,
    TOO_FEW,
    Difference,
    DocumentLosses,
    Outcome,
    accuracy_interval,
    bits_per_byte_difference,
    in_both,
    load_losses,
    saved_losses,
)
from cpt.evaluation.reports import EvaluationReport, ScoreReport
from cpt.evaluation.scoring import Point, course_of, read_evaluations
from cpt.evaluation.sentences import (
    ASK,
    EXCHANGED,
    FORGOT_OF_EXAMPLES,
    HARDER_PAIRS,
    HOLD_OUT_PAIRS,
    MEASURE,
    NO_REWARD,
    NOT_LEARNED,
    READ,
    REWARD,
    differ,
    direction,
    disagreement,
    domain_sentence,
    dominated,
    general_sentence,
    next_step,
    signed,
    worked,
)
from cpt.files import DAMAGED, write_atomic
from cpt.recipe.load import saved_recipe
from cpt.recipe.rules import reported_name
from cpt.recipe.schema import Recipe
from cpt.runs.events import read_events, record_event
from cpt.runs.folder import (
    EVALUATED,
    INPUTS,
    METRICS,
    SAMPLES,
    VERDICT,
    VERDICT_PAGE,
    read_lines,
    read_object,
)
from cpt.runs.record import Run

COUNT = "_examples"
NEW_HEAD = "accuracy"  # the accuracy's name for a reward model, whose head is new
CHANCE = 0.5
NOISE = 1e-3  # difference of log-probabilities between equal models in half precision


@dataclass(frozen=True)
class ExampleSet:
    """One held-out set; each metric before the first step and after the last, None if the stage lacks it."""

    name: str
    examples: int
    loss: tuple[float, float] | None = None
    accuracy: tuple[float, float] | None = None
    margin: tuple[float, float] | None = None
    reward: tuple[float, float] | None = None
    has_reference: bool = False
    """Rewards are relative to the model at the start of the run, so all are equal before the first step."""
    is_new_head: bool = False  # the reward head was initialised randomly

    @property
    def is_against_chance(self) -> bool:
        """Whether the accuracy before the run is meaningless, so that it is compared with 50 %."""
        return self.has_reference or self.is_new_head

    @property
    def has_had_it(self) -> bool:
        """Whether a head with random weights ordered the pairs as well: they are too easy to tell."""
        return (
            self.is_new_head
            and self.accuracy is not None
            and self.accuracy[0] >= max(CHANCE + NEGLIGIBLE, self.accuracy[1])
        )

    @property
    def interval(self) -> tuple[float, float] | None:
        """The confidence interval of the accuracy after the run."""
        if self.accuracy is None:
            return None
        return accuracy_interval(np.arange(self.examples) < round(self.accuracy[1] * self.examples))

    @property
    def worked(self) -> bool | None:
        """Whether the model orders pairs better than chance; None if the interval or the stage does not decide it."""
        if self.interval is None or not self.is_against_chance or self.examples < TOO_FEW:
            return None
        low, high = self.interval
        if self.has_had_it:
            return None
        if low > CHANCE:
            return True
        if high < CHANCE + NEGLIGIBLE:
            return False
        return None

    def sentence(self) -> str:
        if self.accuracy is not None and self.interval is not None:
            low, high = self.interval
            spread = f"{100 * LEVEL:.0f} % interval {100 * low:.0f} to {100 * high:.0f} %"
            share = f"{100 * self.accuracy[1]:.0f} % of {self.examples:,} held-out pairs ({spread})"
            if not self.is_against_chance:
                before = f"before the run in {100 * self.accuracy[0]:.0f} %"
                return f"In {share} the better answer is the likelier one; {before}."
            outcome = {
                True: "It worked",
                False: "It did not work",
                None: "Whether it worked is unknown",
            }[self.worked]
            outcome = "It did harm" if self.worked is False and high < CHANCE else outcome
            than = "half would be chance"
            if self.examples < TOO_FEW:
                than += f"; {self.examples} pairs are too few"
            if self.has_had_it:
                than = f"with random weights it was {100 * self.accuracy[0]:.0f} %, so these pairs are too easy"
            return f"{outcome}: in {share} the better answer has the higher reward; {than}."
        margin = "the margin of wanted over unwanted answers"
        others = {"the mean reward": self.reward, margin: self.margin, "the loss": self.loss}
        changes = [
            f"{what} went from {one[0]:.3f} to {one[1]:.3f}"
            for what, one in others.items()
            if one is not None
        ]
        found = " and ".join(changes) or "nothing was measured"
        return f"On {self.examples:,} held-out examples {found}, without a confidence interval."


def read_example_sets(metrics: Path) -> list[ExampleSet]:
    """The sets with metrics before the first step and later; the last evaluation counts."""
    evaluated = {}
    for log in read_evaluations(metrics):
        if any(key.endswith(COUNT) for key in log):
            evaluated[log["step"]] = log
    if 0 not in evaluated or len(evaluated) < 2:
        return []
    before = evaluated[0]
    after = evaluated[max(evaluated)]

    def both(name: str, *suffixes: str) -> tuple[float, float] | None:
        keys = [f"{EVALUATED}{name}_{suffix}" for suffix in suffixes]
        return next(
            ((before[key], after[key]) for key in keys if key in before and key in after), None
        )

    sets = []
    for key in before:
        if not key.endswith(COUNT) or key not in after:
            continue
        name = key.removeprefix(EVALUATED).removesuffix(COUNT)
        rewards = both(name, "rewards/chosen")
        likelihoods = both(name, "logps/chosen")
        is_close = rewards and likelihoods and abs(rewards[0]) <= NOISE * abs(likelihoods[0])
        found = ExampleSet(
            name,
            int(after[f"{EVALUATED}{name}{COUNT}"]),
            loss=both(name, "loss"),
            accuracy=both(name, "rewards/accuracies", "accuracy"),
            margin=both(name, "rewards/margins", "margin"),
            reward=both(name, "reward"),
            has_reference=bool(is_close),
            is_new_head=both(name, NEW_HEAD) is not None,
        )
        sets.append(found)
    return sets


MUCH_SKIPPED = 0.1  # share of steps above which the headline reports it
HITS_SHOWN = 5
POINTS_SHOWN = 7
SAMPLES_SHOWN = 3
LONGEST_SAMPLE = 200  # characters


def gives_scores(examples: Sequence[ExampleSet]) -> bool:
    """Whether the model outputs scores instead of text."""
    return bool(examples) and all(one.is_new_head for one in examples)


@dataclass(frozen=True)
class WorseDocument:
    hash: str  # xxh3-64 of the text, in hexadecimal digits
    change: float  # bits per byte
    where: str | None = None  # file and line; None until the held-out documents were read again


@dataclass(frozen=True)
class SetVerdict:
    name: str
    is_general: bool
    before: float
    after: float
    documents: int | None = None
    difference: Difference | None = None  # None, without an interval, if documents cannot be paired
    worst: list[WorseDocument] = field(default_factory=list)

    @property
    def outcome(self) -> Outcome:
        if self.difference:
            return self.difference.outcome()
        return "unknown"


@dataclass(frozen=True)
class SourceFacts:
    name: str
    documents: int
    share: float  # share of the run's tokens
    licence: str | None
    decontaminated: int = 0  # documents that the filter `decontaminate` dropped
    account: str = ""  # what became of its text; empty for a run of an earlier version


@dataclass(frozen=True)
class NotRun:
    what: str
    why: str  # the reason, with the command to run it


@dataclass(frozen=True)
class Verdict:
    run: str
    model: str
    base: str | None
    tokens: int
    sets: list[SetVerdict]
    domain: Difference | None  # bits per byte over all domain sets
    general: Difference | None  # bits per byte over all general sets
    sources: list[SourceFacts]
    stopped: str | None = None  # why the run ended before its budget
    skipped_steps: tuple[int, int] = (0, 0)  # steps that the loss guard skipped, and all steps
    domain_test: list[ScoreReport] = field(default_factory=list)
    tasks: list[ScoreReport] = field(default_factory=list)
    contamination: Contamination | None = None
    retention: list[Point] = field(default_factory=list)
    samples: list[dict[str, str]] = field(
        default_factory=list
    )  # prompt, and its continuations before and after
    not_run: list[NotRun] = field(default_factory=list)
    serve: str | None = None
    is_complete: bool = False  # False while it only has the results measured during the run
    examples: list[ExampleSet] = field(
        default_factory=list
    )  # held-out pairs, rated answers and prompts
    fallbacks: list[str] = field(
        default_factory=list
    )  # values that this machine forced, each with its reason
    learning_rate: float | None = None  # its peak
    left_out: list[str] = field(
        default_factory=list
    )  # very long documents that were not evaluated, a sentence each set

    gain: list[Gain] = field(default_factory=list)  # of the domain sets that improved
    are_documents: bool = True  # what was trained on; False: conversations or pairs

    def differences(self, *, is_general: bool) -> dict[str, Difference]:
        """Of the sets of a kind, by name."""
        return {
            one.name: one.difference
            for one in self.sets
            if one.is_general == is_general and one.difference
        }

    @property
    def worked(self) -> bool | None:
        """Whether the domain (for a run on pairs, the choice between answers) improved; None if that is open, or if
        only some of the sets did."""
        if self.examples:
            results = [examples.worked for examples in self.examples]
            if None in results:
                return None
            return all(results)
        if self.domain is None:
            return None
        sets = list(self.differences(is_general=False).values())
        if not differ(sets, self.domain):
            return worked(self.domain)
        if any(worked(difference) for difference in sets):
            return None
        return False

    def headline(self) -> str:
        """The result: what was learned, and what was forgotten."""
        return " ".join(self.findings())

    def findings(self) -> list[str]:
        """A sentence on what was learned and one on what was forgotten; more if sets of a kind differ."""
        if self.examples:
            sentences = [one.sentence() for one in self.examples]
            if not gives_scores(self.examples):
                cost = [
                    *self.of_kind(general_sentence, self.domain, "held-out domain text"),
                    *self.of_kind(general_sentence, self.general, "held-out general text"),
                ]
                sentences += cost or self.not_measured("text")
        elif self.domain is None:
            sentences = ["Whether it worked is unknown: no domain documents were compared."]
        else:
            forgetting = self.of_kind(general_sentence, self.general, "general text")
            sentences = [
                *self.of_kind(domain_sentence, self.domain, "domain text"),
                *self.doubts(),
                *(forgetting or self.not_measured()),
            ]
        skipped, steps = self.skipped_steps
        if skipped and skipped >= MUCH_SKIPPED * steps:
            sentences.append(self.skipped_sentence())
        return sentences

    def doubts(self) -> list[str]:
        """Sets of which most of the gain may be learned by heart."""
        names = [f"`{gain.set_name}`" for gain in self.gain if gain.is_copied]
        if not names:
            return []
        return [
            f"But most of the gain on {', '.join(names)} is in phrases that training documents also have."
        ]

    def not_measured(self, what: str = "general text") -> list[str]:
        """A model from new weights has nothing to forget."""
        if self.base:
            return [f"Forgetting was not measured: no {what} was held out."]
        return []

    def of_kind(
        self, sentence: Callable[[Difference, str], str], together: Difference | None, what: str
    ) -> list[str]:
        """One sentence on all sets of a kind; one on each if they differ."""
        if together is None:
            return []
        sets = self.differences(is_general=together is self.general)
        found = {what: together}
        if differ(list(sets.values()), together):
            found = {f"`{name}`": one for name, one in sets.items()}
        sentences = [(sentence(one, name), disagreement(one)) for name, one in found.items()]
        return [text for pair in sentences for text in pair if text]

    def next_step(self) -> str:
        """What to do next: the row of the table in docs/tutorials/your_documents.md, with the paths of this run."""
        against = f" --against {self.base}" if self.base else ""
        return self.remedy().replace("RUN --against BASE", f"{self.model}{against}")

    def remedy(self) -> str:
        general = self.general
        of_general = self.differences(is_general=True)
        worst = max(of_general.values(), key=lambda one: direction(one.outcome()), default=None)
        if worst is not None and worst.outcome() == "worse":
            general = worst
        if not self.examples:
            domain = list(self.differences(is_general=False).values())
            outcomes = [one.outcome() for one in domain]
            return next_step(
                self.domain,
                general,
                outcomes,
                can_forget=self.base is not None,
                has_copies=self.has_copies,
                are_documents=self.are_documents,
            )
        if gives_scores(self.examples) and self.worked:
            return REWARD
        texts = [] if gives_scores(self.examples) else [self.domain, general]
        if any(one is not None and one.outcome() == "worse" for one in texts):
            return FORGOT_OF_EXAMPLES
        if self.worked:
            if any(texts):
                return ASK
            return MEASURE
        rewards = [one.reward for one in self.examples if one.reward is not None]
        if rewards and all(after <= before for before, after in rewards):
            return NO_REWARD
        if self.worked is False:
            is_below = any(one.interval and one.interval[1] < CHANCE for one in self.examples)
            if is_below:
                return EXCHANGED
            return NOT_LEARNED
        if any(pairs.has_had_it for pairs in self.examples):
            return HARDER_PAIRS
        if any(one.is_against_chance and one.interval for one in self.examples):
            return HOLD_OUT_PAIRS
        return READ

    @property
    def is_usable(self) -> bool:
        """Whether the page shows how to serve the model: nothing became worse, and it is not learned by heart."""
        has_harm = any(of_set.outcome == "worse" for of_set in self.sets if not of_set.is_general)
        return self.worked is not False and not has_harm and not self.has_copies

    @property
    def has_copies(self) -> bool:
        """Whether training documents that contain held-out text were not dropped."""
        dropped = sum(source.decontaminated for source in self.sources)
        return self.contamination is not None and self.contamination.num_contaminated > dropped

    def skipped_sentence(self) -> str:
        """`38 of 40 steps were skipped`; empty if no step was skipped."""
        skipped, steps = self.skipped_steps
        reasons = "were skipped by the loss guard (see events.jsonl)."
        if skipped:
            return f"{skipped:,} of {steps:,} steps {reasons}"
        return ""

    def notes(self) -> list[str]:
        """Sentences on single sets: long documents that decide the change per byte, or that were left out;
        what a gain is made of."""
        notes = []
        for of_set in self.sets:
            difference = of_set.difference
            if difference is None or not difference.is_dominated:
                continue
            if difference.items > FEW_TO_EXCLUDE:
                notes.append(f"`{of_set.name}`: {dominated(difference)}")
        notes += self.left_out
        for gain in self.gain:
            notes += gain.sentences()
        return notes

    def to_json(self) -> dict[str, Any]:
        content = {**asdict(self), "headline": self.headline(), "worked": self.worked}
        content["next"] = self.next_step()
        for entry, one in zip(content["sets"], self.sets, strict=True):
            entry["outcome"] = one.outcome
        return content


def verdict_of_run(
    folder: Path,
    *,
    evaluation: EvaluationReport | None = None,
    contamination: Contamination | None = None,
    serve: str | None = None,
    not_run: Sequence[NotRun] = (),
    is_complete: bool = False,
    gain: Sequence[Gain] = (),
) -> Verdict:
    """Build the verdict of a finished run; the arguments have later measurements, and `not_run` the failed ones."""
    recipe = saved_recipe(folder)
    run = Run(folder)
    evaluations = read_evaluations(folder / METRICS)
    course = course_of(evaluations)
    examples = read_example_sets(folder / METRICS)
    inputs = read_object(folder / INPUTS)
    kept = general_sets(recipe.model_dump(mode="json", by_alias=True), inputs)
    sets, domain, general = compare_sets(folder, course, recipe, kept)
    missing = not_measured(folder, recipe, sets, examples, evaluation)
    if contamination is None:
        why = "training documents were not searched: cpt contamination RECIPE"
        missing["contamination"] = why
    # `domain test of code` in `not_run` is more specific than `domain test`.
    unmentioned = []
    for what, why in missing.items():
        if not any(entry.what.startswith(what) for entry in not_run):
            unmentioned.append(NotRun(what, why))
    return Verdict(
        run=folder.name,
        model=str(run.export_folder),
        base=None if recipe.model.from_scratch else recipe.model.path,
        tokens=max((line["tokens"] for line in evaluations), default=0),
        sets=sets,
        domain=domain,
        general=general,
        sources=source_facts(inputs),
        stopped=run.status().get("stopped"),
        skipped_steps=run.skipped_share(),
        domain_test=list(evaluation.domain_test) if evaluation is not None else [],
        tasks=list(evaluation.tasks) if evaluation is not None else [],
        contamination=contamination,
        retention=course,
        samples=read_samples(folder),
        not_run=[*unmentioned, *not_run],
        serve=None if gives_scores(examples) else serve,
        learning_rate=recipe.optimizer.learning_rate,
        is_complete=is_complete,
        examples=examples,
        fallbacks=read_fallbacks(folder),
        left_out=list(inputs.get("data", {}).get("left_out", {}).values()),
        gain=list(gain),
        are_documents=form_of_stage(recipe.stage) == "document",
    )


def read_fallbacks(folder: Path) -> list[str]:
    """Return the last fall-back of each key of the recipe, from the run's events."""
    sentences: dict[str, str] = {}
    for event in read_events(folder):
        if event["kind"] == "fallback":
            value = json.dumps(event["value"])
            sentences[event["key"]] = (
                f"`{event['key']}` is {value}, because {event['reason'].removesuffix('.')}."
            )
    return list(sentences.values())


def compare_sets(
    folder: Path, course: Sequence[Point], recipe: Recipe, kept: Collection[str]
) -> tuple[list[SetVerdict], Difference | None, Difference | None]:
    """Compare each set that was evaluated before the first step and after the last, and all domain sets and all
    general sets (`kept`) together, if documents can be paired."""
    if not course or course[0].step != 0:
        return [], None, None
    both = losses_of_ends(folder)
    sets = []
    for name, was in course[0].bits_per_byte.items():
        if name not in course[-1].bits_per_byte:
            continue
        documents = len(both[name][0].hashes) if name in both else None
        now = course[-1].bits_per_byte[name]
        difference = None
        worst = list[WorseDocument]()
        if documents is not None and documents > 1:
            old, new = both[name]
            difference = bits_per_byte_difference([old], [new])
            worst = worst_documents(old, new)
            was = difference.before
            now = difference.after
        sets.append(SetVerdict(name, name in kept, was, now, documents, difference, worst))
    together = []
    for is_general in (False, True):
        names = [one.name for one in sets if one.is_general == is_general and one.difference]
        weights = None if is_general else domain_weights(recipe, names)
        earlier, later = ([both[name][side] for name in names] for side in (0, 1))
        together.append(bits_per_byte_difference(earlier, later, weights) if names else None)
    return sets, together[0], together[1]


def losses_of_ends(folder: Path) -> dict[str, tuple[DocumentLosses, DocumentLosses]]:
    """Losses before the first step and after the last, of each set; none if they were not kept."""
    files = saved_losses(folder)
    if 0 not in files or len(files) < 2:
        return {}
    try:
        before = load_losses(files[0])
        after = load_losses(files[max(files)])
    except CheckpointError as problem:
        record_event(folder, DAMAGED, f"The verdict lacks intervals: {problem}")
        return {}
    return {name: in_both(before[name], after[name]) for name in before.keys() & after.keys()}


def worst_documents(before: DocumentLosses, after: DocumentLosses) -> list[WorseDocument]:
    """Up to `EXAMPLES` documents whose bits per byte rose most."""
    changes = (after.nats - before.nats) / math.log(2) / before.num_bytes
    worst = [
        int(number)
        for number in np.argsort(-changes, kind="stable")[:EXAMPLES]
        if changes[number] > 0
    ]
    return [
        WorseDocument(f"{before.hashes[number]:016x}", float(changes[number])) for number in worst
    ]


def not_measured(
    folder: Path,
    recipe: Recipe,
    sets: Sequence[SetVerdict],
    examples: Sequence[ExampleSet],
    evaluation: EvaluationReport | None,
) -> dict[str, str]:
    """Measurement that was not run -> reason, with the command to run it."""
    against = "" if recipe.model.from_scratch else f" --against {recipe.model.path}"
    evaluate = f"cpt evaluate {folder}{against}"
    missing: dict[str, str] = {}
    if gives_scores(examples):
        return missing
    if not sets and examples:
        missing["held-out text"] = (
            "not requested: text (txt or md files, or rows with a `text_column`) in `evaluation.perplexity`"
        )
    elif not sets:
        missing["held-out text"] = (
            "nothing was held out: set `evaluation.held_out_share` or `evaluation.perplexity`"
        )
    elif not any(one.is_general for one in sets):
        missing["forgetting"] = (
            "no set of general text was held out. A public one: `evaluation.retain: general`"
        )
    known = {one.name for one in sets} | {one.name for one in examples}
    if sets and (added := {reported_name(one) for one in recipe.evaluation.perplexity} - known):
        missing[f"change of {', '.join(sorted(added))}"] = (
            f"added during the run: no result before it. {evaluate}"
        )
    unpaired = ", ".join(one.name for one in sets if one.difference is None)
    if unpaired:
        missing[f"intervals of {unpaired}"] = (
            f"losses per document are missing, or there is one document. {evaluate}"
        )
    if (sets or not examples) and (evaluation is None or not evaluation.domain_test):
        missing["domain test"] = f"not requested: {evaluate} --domain-test SET"
    if evaluation is None or not evaluation.tasks:
        missing["benchmarks"] = (
            f"not requested (`evaluation.tasks`): {evaluate} --task hellaswag --task mmlu"
        )
    return missing


def source_facts(inputs: dict[str, Any]) -> list[SourceFacts]:
    sources = []
    for name, facts in inputs.get("data", {}).get("sources", {}).items():
        decontaminated = sum(
            count for reason, count in facts["dropped"].items() if reason.startswith(REASON)
        )
        source = SourceFacts(
            name=name,
            documents=facts["documents"],
            share=facts["share"],
            licence=facts["licence"],
            decontaminated=decontaminated,
            account=facts.get("account", ""),
        )
        sources.append(source)
    return sources


def read_samples(folder: Path) -> list[dict[str, str]]:
    """Each prompt with its continuations before the first step and after the last."""
    by_step: dict[int, dict[str, str]] = {}
    for line in read_lines(folder / SAMPLES):
        if {"step", "prompt", "continuation"} <= line.keys():
            by_step.setdefault(line["step"], {})[line["prompt"]] = line["continuation"]
    if not by_step:
        return []
    last = max(by_step)
    before = by_step.get(0, {})
    if last == 0:
        return []
    samples = []
    for prompt, after in by_step[last].items():
        if prompt in before:
            samples.append({"prompt": prompt, "before": before[prompt], "after": after})
    return samples


def write_verdict(folder: Path, verdict: Verdict) -> None:
    content = json.dumps(verdict.to_json(), indent=2, ensure_ascii=False) + "\n"
    try:
        write_atomic(folder / VERDICT_PAGE, verdict_page(verdict), reuse_space=True)
        write_atomic(folder / VERDICT, content, reuse_space=True)
    except OSError as problem:
        why = f"The verdict cannot be written: {problem.strerror}. Again: cpt verdict {folder}"
        record_event(folder, "not_written", why)


def verdict_page(verdict: Verdict) -> str:
    environment = Environment(trim_blocks=True, lstrip_blocks=True)
    filters: dict[str, Any] = {"cell": lambda text: text.replace("|", "\\|")}
    environment.filters |= filters | {"sample": sample, "signed": signed}
    template = environment.from_string(
        Path(__file__).with_name("verdict.md.jinja").read_text(encoding="utf-8")
    )
    contamination = verdict.contamination
    hits = [] if contamination is None else contamination.hits[:HITS_SHOWN]
    return template.render(
        verdict=verdict,
        examples=figures_of_examples(verdict.examples),
        sets=sorted(verdict.sets, key=lambda of_set: of_set.is_general),
        scores=[*verdict.domain_test, *verdict.tasks],
        course=spread_evenly(verdict.retention, POINTS_SHOWN),
        contamination=contamination_text(verdict),
        hits=hits,
        num_more_hits=0 if contamination is None else contamination.num_contaminated - len(hits),
        samples=verdict.samples[:SAMPLES_SHOWN],
    )


def figures_of_examples(
    examples: Sequence[ExampleSet],
) -> list[tuple[ExampleSet, str, tuple[float, float]]]:
    """Each metric that a set has: the set, the metric's name, before and after."""
    rows = []
    for examples_of_set in examples:
        for name in ("loss", "accuracy", "margin", "reward"):
            figure = getattr(examples_of_set, name)
            if figure is not None:
                rows.append((examples_of_set, name, figure))
    return rows


def spread_evenly(points: Sequence[Point], count: int) -> list[Point]:
    """At most `count` points, with the first and the last; none of fewer than three."""
    last = len(points) - 1
    if last <= 1:
        return []
    numbers = {round(place * last / (count - 1)) for place in range(count)}
    return [points[number] for number in sorted(numbers)]


def contamination_text(verdict: Verdict) -> str:
    sentences = []
    if verdict.contamination is not None:
        sentences.append(verdict.contamination.summary())
    num_dropped = sum(source.decontaminated for source in verdict.sources)
    if num_dropped:
        sentences.append(f"{num_dropped:,} training documents were dropped for it.")
    return " ".join(sentences)


def sample(text: str) -> str:
    """The start of a text as inline code, with arrows for line breaks."""
    line = text[:LONGEST_SAMPLE].replace("`", "'").replace("\n", " ↵ ")
    if line.strip(" ↵"):
        return f"`{line}{'...' if len(text) > LONGEST_SAMPLE else ''}`"
    return "(nothing)"
