"""Whether continued pre-training worked, what it cost, and what nobody looked at: everything that is known of a
finished run."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cpt.data.contamination import Contamination
from cpt.errors import CheckpointError
from cpt.evaluation.findings import Findings, ScoreFinding
from cpt.evaluation.held_out_examples import ExampleSet, read_example_sets
from cpt.evaluation.kept_losses import DocumentLosses, kept_losses, load_losses
from cpt.evaluation.paired import FEW, TOO_FEW, Difference, Outcome, bits_per_byte_difference
from cpt.evaluation.retention import Point, last_tokens, read_course
from cpt.evaluation.source_facts import SourceFacts, sources_of
from cpt.files import DAMAGED
from cpt.recipe.load import load_recipe
from cpt.recipe.schema import Recipe
from cpt.runs.events import record_event
from cpt.runs.folder import METRICS, RECIPE, SAMPLES, read_lines
from cpt.runs.record import Run

MUCH_SKIPPED = 0.1  # of the steps; the headline then says so
GENERAL_SET = "HuggingFaceFW/fineweb-edu (subset sample-10BT) or Salesforce/wikitext (subset wikitext-103-raw-v1)"


@dataclass(frozen=True)
class SetVerdict:
    """One held-out set before and after."""

    name: str
    is_general: bool
    before: float
    """Bits per byte."""
    after: float
    documents: int | None = None
    difference: Difference | None = None
    """None where documents cannot be paired: then there is no interval."""


@dataclass(frozen=True)
class Sample:
    """What the model wrote after a prompt."""

    prompt: str
    before: str
    after: str


@dataclass(frozen=True)
class NotRun:
    """What the verdict does not rest on."""

    what: str
    why: str
    """And how to run it."""


@dataclass(frozen=True)
class Verdict:
    """One page about a run."""

    run: str
    model: str
    """Where the trained model lies."""
    base: str | None
    tokens: int
    """Trained on."""
    sets: list[SetVerdict]
    domain: Difference | None
    """Bits per byte of all domain sets together."""
    general: Difference | None
    """And of all general ones."""
    sources: list[SourceFacts]
    stopped: str | None = None
    """Why the run ended before its budget."""
    skipped_steps: tuple[int, int] = (0, 0)
    """Steps whose update the loss guard skipped, and all steps."""
    domain_test: list[ScoreFinding] = field(default_factory=list)
    tasks: list[ScoreFinding] = field(default_factory=list)
    contamination: Contamination | None = None
    retention: list[Point] = field(default_factory=list)
    frontier: str | None = None
    """A picture beside the page."""
    samples: list[Sample] = field(default_factory=list)
    not_run: list[NotRun] = field(default_factory=list)
    serve: str | None = None
    """The command that serves the model."""
    is_complete: bool = False
    """False while only what the run itself measured is in it."""
    examples: list[ExampleSet] = field(default_factory=list)
    """Held-out pairs, judged answers and prompts, of stages that learn from such."""

    @property
    def worked(self) -> bool | None:
        """Whether the domain, or where there are pairs their choice, became better; None where the interval leaves it
        open."""
        if self.examples:
            results = [one.worked for one in self.examples]
            return None if None in results else all(results)
        outcome = "unknown" if self.domain is None else outcome_of_set(self.domain, is_general=False)
        return None if outcome == "unknown" else outcome == "better"

    def headline(self) -> str:
        """What happened, in a few sentences."""
        skipped, steps = self.skipped_steps
        is_much = skipped and skipped >= MUCH_SKIPPED * steps
        return f"{self.outcome()} {self.skipped_sentence()}" if is_much else self.outcome()

    def skipped_sentence(self) -> str:
        """`38 of 40 steps were skipped`; empty where none was."""
        skipped, steps = self.skipped_steps
        return (
            f"{skipped:,} of {steps:,} steps were skipped by the loss guard: events.jsonl has the reasons."
            if skipped
            else ""
        )

    def outcome(self) -> str:
        """What the evaluation found."""
        if self.examples:
            return " ".join([*(one.sentence() for one in self.examples), *self.cost_of_text()])
        if self.domain is None:
            return (
                "Whether it worked is not known: no domain documents were compared one by one, so no interval can be"
                " given."
            )
        return (
            f"{domain_sentence(self.domain, 'its base' if self.base is not None else 'before its first step')}"
            f" {self.forgetting()}"
        )

    def forgetting(self) -> str:
        """What happened to general text."""
        return (
            general_sentence(self.general)
            if self.general
            else "What it forgot is not known: no general set was followed."
        )

    @property
    def is_of_scores(self) -> bool:
        """Whether the model gives scores, and no text any more."""
        return bool(self.examples) and all(one.is_new_head for one in self.examples)

    def cost_of_text(self) -> list[str]:
        """What a run on examples did to held-out text."""
        if self.is_of_scores:
            return []
        followed = [
            (what, found) for what, found in (("domain", self.domain), ("general", self.general)) if found is not None
        ]
        if not followed:
            return ["What it forgot is not known: no held-out text was followed."]
        return [general_sentence(found, f"held-out {what} text") for what, found in followed]

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        content = asdict(self)
        content["headline"], content["worked"] = self.headline(), self.worked
        return content


def outcome_of_set(difference: Difference, *, is_general: bool) -> Outcome:
    """As `Difference.outcome`; "unknown" also where only a gain of general text, or only a loss of the domain, is
    excluded."""
    outcome = difference.outcome()
    return "unknown" if outcome == ("not better" if is_general else "not worse") else outcome


def domain_sentence(domain: Difference, other: str) -> str:
    """Whether the domain was learned.

    Args:
        other: what the model is compared with.
    """
    outcome = outcome_of_set(domain, is_general=False)
    if outcome in ("better", "worse"):
        what, how = ("It worked", "fewer") if outcome == "better" else ("It did harm", "more")
        few = f" Only {domain.items} documents were compared." if domain.is_on_few else ""
        return (
            f"{what}: on held-out domain text the model needs {relative(domain)} {how} bits per byte than"
            f" {other}.{few}"
        )
    if outcome != "unknown":
        gain = percent(max(0.0, -domain.low), domain)
        return (
            f"It did not work: a gain of more than {gain:.1f} % on held-out domain text is excluded"
            f" ({evidence(domain)})."
        )
    if domain.items < TOO_FEW:
        return f"Whether it worked is unknown: {too_few(domain)}"
    return (
        "Whether it worked is unknown: held-out domain text may have become better or worse"
        f" ({evidence(domain)}).{more(domain)}"
    )


def general_sentence(general: Difference, what: str = "general text") -> str:
    """What became of text that the model should not forget."""
    outcome, text = outcome_of_set(general, is_general=True), what[0].upper() + what[1:]
    if outcome == "better":
        return f"{text} became better, by {relative(general)}."
    if outcome == "worse":
        return f"It cost {relative(general)} more bits per byte on {what}."
    if general.items < TOO_FEW:
        return f"Whether {what} became worse is unknown: {too_few(general)}"
    loss = percent(max(0.0, general.high), general)
    if outcome != "unknown":
        return f"{text} is as good as before: a loss of more than {loss:.1f} % is excluded ({evidence(general)})."
    return (
        f"Whether {what} became worse is unknown: a loss of {loss:.1f} % cannot be excluded"
        f" ({evidence(general)}).{more(general)}"
    )


def evidence(difference: Difference) -> str:
    """`95 % interval -29.0 to +55.0 % from 20 documents, 19 of them worse`."""
    low, high = (percent(value, difference) for value in (difference.low, difference.high))
    worse = "" if difference.num_worse is None else f", {difference.num_worse:,} of them worse"
    return (
        f"{100 * difference.level:.0f} % interval {low:+.1f} to {high:+.1f} % from {difference.items:,}"
        f" documents{worse}"
    )


def too_few(difference: Difference) -> str:
    """Why nothing can be concluded, and how many documents are needed."""
    return f"{difference.items} documents are too few to tell. Hold out at least {TOO_FEW}, better {FEW} or more."


def more(difference: Difference) -> str:
    """What would make an unknown change known."""
    if difference.is_dominated:
        return f" {dominated(difference)}"
    needed = round_up(difference.items_for_negligible() - difference.items)
    return (
        f" Hold out about {needed:,} more documents for an interval of"
        f" +-{percent(difference.negligible, difference):.0f} %."
    )


def dominated(difference: Difference) -> str:
    """The warning about one document that decides much of the result."""
    share = 100 * (difference.largest_share or 0)
    return (
        f"One document holds {share:.0f} % of the bytes and decides much of this: split it or leave it out, and hold"
        " out more documents."
    )


def round_up(number: int, digits: int = 2) -> int:
    """1,234 becomes 1,300."""
    step = 10 ** max(0, len(str(number)) - digits)
    return -(-number // step) * step


def percent(value: float, difference: Difference) -> float:
    """Of the value before."""
    return 100 * value / difference.before


def relative(difference: Difference) -> str:
    """`19.2 % (95 % interval 18.0 to 20.4 %)`; the sign of both ends is that of the change."""
    change, *ends = (
        abs(percent(value, difference)) for value in (difference.difference, difference.low, difference.high)
    )
    return f"{change:.1f} % ({100 * difference.level:.0f} % interval {min(ends):.1f} to {max(ends):.1f} %)"


def verdict_of_run(
    folder: Path,
    *,
    evaluation: Findings | None = None,
    contamination: Contamination | None = None,
    serve: str | None = None,
    frontier: str | None = None,
    not_run: Sequence[NotRun] = (),
    is_complete: bool = False,
) -> Verdict:
    """What a run's folder tells, with what was found beside it.

    Args:
        folder: of a finished run.
        evaluation: of `findings` against the base: domain test and tasks.
        frontier: name of the picture beside the page.
        not_run: further things that were left out, and why.
        is_complete: False while things that will be measured are not.
    """
    recipe, run = load_recipe(folder / RECIPE), Run(folder)
    course = read_course(folder / METRICS)
    before, after = losses_before_and_after(folder)
    general = set(recipe.evaluation.retain)
    sets, examples = judged_sets(course, before, after, general), read_example_sets(folder / METRICS)
    parts = {
        is_general: [one.name for one in sets if one.is_general == is_general and one.difference]
        for is_general in (True, False)
    }
    domain_of_all, general_of_all = (
        bits_per_byte_difference([before[name] for name in names], [after[name] for name in names]) if names else None
        for names in (parts[False], parts[True])
    )
    return Verdict(
        run=folder.name,
        model=str(run.export_folder),
        base=None if recipe.model.from_scratch else recipe.model.path,
        tokens=last_tokens(folder / METRICS),
        sets=sets,
        domain=domain_of_all,
        general=general_of_all,
        sources=sources_of(folder),
        stopped=run.status().get("stopped"),
        skipped_steps=run.skipped_share(),
        domain_test=list(evaluation.domain_test) if evaluation is not None else [],
        tasks=list(evaluation.tasks) if evaluation is not None else [],
        contamination=contamination,
        retention=course,
        frontier=frontier,
        samples=samples_of(folder),
        not_run=[*unmentioned(left_out(folder, sets, evaluation, contamination, recipe, examples), not_run), *not_run],
        serve=serve,
        is_complete=is_complete,
        examples=examples,
    )


def unmentioned(general: Sequence[NotRun], special: Sequence[NotRun]) -> list[NotRun]:
    """Those of which nothing more special is told: `domain test of code` says more than `domain test`."""
    return [one for one in general if not any(other.what.startswith(one.what) for other in special)]


def losses_before_and_after(folder: Path) -> tuple[dict[str, DocumentLosses], dict[str, DocumentLosses]]:
    """Of each document, before the first step and at the last evaluation; empty where the run did not keep them, or a
    file is damaged."""
    files = kept_losses(folder)
    if 0 not in files or len(files) < 2:
        return {}, {}
    try:
        return load_losses(files[0]), load_losses(files[max(files)])
    except CheckpointError as problem:
        record_event(folder, DAMAGED, f"The verdict has no intervals: {problem}")
        return {}, {}


def judged_sets(
    course: Sequence[Point], before: dict[str, DocumentLosses], after: dict[str, DocumentLosses], general: set[str]
) -> list[SetVerdict]:
    """Each set that was evaluated before the first step and after the last."""
    if not course or course[0].step != 0:
        return []
    sets = []
    for name, was in course[0].bits_per_byte.items():
        if name not in course[-1].bits_per_byte:
            continue
        documents = len(before[name].hashes) if name in before and name in after else None
        has_pairs = documents is not None and documents > 1
        difference = bits_per_byte_difference([before[name]], [after[name]]) if has_pairs else None
        sets.append(SetVerdict(name, name in general, was, course[-1].bits_per_byte[name], documents, difference))
    return sets


def samples_of(folder: Path) -> list[Sample]:
    """What was written before the first and after the last step, prompt by prompt."""
    lines = [line for line in read_lines(folder / SAMPLES) if {"step", "prompt", "continuation"} <= line.keys()]
    last = max((line["step"] for line in lines), default=0)
    before = {line["prompt"]: line["continuation"] for line in lines if line["step"] == 0}
    return [
        Sample(line["prompt"], before[line["prompt"]], line["continuation"])
        for line in lines
        if line["step"] == last and last and line["prompt"] in before
    ]


def left_out(
    folder: Path,
    sets: Sequence[SetVerdict],
    evaluation: Findings | None,
    contamination: Contamination | None,
    recipe: Recipe,
    examples: Sequence[ExampleSet] = (),
) -> list[NotRun]:
    """What was not looked at, why, and how to; of a model that gives scores, whatever takes text from it."""
    missing = []
    evaluate = (
        f"cpt evaluate {folder}"
        if recipe.model.from_scratch
        else f"cpt evaluate {folder} --against {recipe.model.path}"
    )
    if examples and all(one.is_new_head for one in examples):
        return missing_search(contamination)
    if not sets and examples:
        missing.append(
            NotRun(
                "held-out text", "none was named: `evaluation.perplexity` takes txt or md files, or a `text_column`"
            )
        )
    elif not sets:
        missing.append(
            NotRun("held-out text", "nothing was held out: set `evaluation.held_out_share` or `evaluation.perplexity`")
        )
    if sets and not any(one.is_general for one in sets):
        why = f"`evaluation.retain` names no held-out set of general text. A public one: {GENERAL_SET}"
        missing.append(NotRun("forgetting", why))
    if unpaired := [one.name for one in sets if one.difference is None]:
        missing.append(
            NotRun(
                f"intervals of {', '.join(unpaired)}",
                f"no losses by document were kept, or there is one document. {evaluate}",
            )
        )
    if (sets or not examples) and (evaluation is None or not evaluation.domain_test):
        missing.append(NotRun("domain test", f"not asked for: {evaluate} --domain-test SET"))
    if evaluation is None or not evaluation.tasks:
        told = "not asked for (`evaluation.tasks`)"
        missing.append(NotRun("benchmarks", f"{told}: {evaluate} --task hellaswag --task mmlu"))
    return [*missing, *missing_search(contamination)]


def missing_search(contamination: Contamination | None) -> list[NotRun]:
    """That nobody looked for evaluation documents among the training documents."""
    why = "training documents were not searched for evaluation documents: cpt contamination RECIPE"
    return [] if contamination is not None else [NotRun("contamination", why)]
