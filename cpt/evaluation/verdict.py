"""The verdict on a finished run: whether continued pre-training worked, what it cost, and what was not measured. As a
page and as a JSON file."""

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
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
    FEWEST,
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
    Content,
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
    is_new_head: bool = False
    """The reward head was initialised randomly."""

    @property
    def is_against_chance(self) -> bool:
        """Whether the accuracy before the run is meaningless, so that it is compared with 50 %."""
        return self.has_reference or self.is_new_head

    @property
    def is_too_easy(self) -> bool:
        """Whether a head with random weights ordered the pairs as well."""
        if self.accuracy is None or not self.is_new_head:
            return False
        before, after = self.accuracy
        return before >= max(CHANCE + NEGLIGIBLE, after)

    @property
    def interval(self) -> tuple[float, float] | None:
        """The confidence interval of the accuracy after the run."""
        if self.accuracy is None:
            return None
        num_correct = round(self.accuracy[1] * self.examples)
        return accuracy_interval(np.arange(self.examples) < num_correct)

    @property
    def worked(self) -> bool | None:
        """Whether the model orders pairs better than chance; None if the interval or the stage does not decide it."""
        if self.interval is None or not self.is_against_chance or self.examples < TOO_FEW:
            return None
        low, high = self.interval
        if self.is_too_easy:
            return None
        if low > CHANCE:
            return True
        if high < CHANCE + NEGLIGIBLE:
            return False
        return None

    def sentence(self) -> str:
        if self.accuracy is not None and self.interval is not None:
            return self.sentence_on_pairs(self.accuracy, self.interval)
        metrics = {
            "the mean reward": self.reward,
            "the margin of wanted over unwanted answers": self.margin,
            "the loss": self.loss,
        }
        changes = []
        for name, metric in metrics.items():
            if metric is not None:
                before, after = metric
                changes.append(f"{name} went from {before:.3f} to {after:.3f}")
        measured = " and ".join(changes) or "nothing was measured"
        return f"On {self.examples:,} held-out examples {measured}, without a confidence interval."

    def sentence_on_pairs(
        self, accuracy: tuple[float, float], interval: tuple[float, float]
    ) -> str:
        before, after = accuracy
        low, high = interval
        share = (
            f"{100 * after:.0f} % of {self.examples:,} held-out pairs"
            f" ({100 * LEVEL:.0f} % interval {100 * low:.0f} to {100 * high:.0f} %)"
        )
        if not self.is_against_chance:
            was = f"before the run in {100 * before:.0f} %"
            return f"In {share} the better answer is the likelier one; {was}."
        if self.worked is None:
            outcome = "Whether it worked is unknown"
        elif self.worked:
            outcome = "It worked"
        elif high < CHANCE:
            outcome = "It did harm"
        else:
            outcome = "It did not work"
        remark = "half would be chance"
        if self.is_too_easy:
            remark = f"with random weights it was {100 * before:.0f} %, so these pairs are too easy"
        elif self.examples < TOO_FEW:
            remark += f"; {self.examples} pairs are too few"
        return f"{outcome}: in {share} the better answer has the higher reward; {remark}."


def read_example_sets(metrics: Path) -> list[ExampleSet]:
    """The sets with metrics before the first step and later; the last evaluation counts."""
    evaluations = {}
    for line in read_evaluations(metrics):
        if any(key.endswith(COUNT) for key in line):
            evaluations[line["step"]] = line
    if 0 not in evaluations or len(evaluations) < 2:
        return []
    before = evaluations[0]
    after = evaluations[max(evaluations)]
    example_sets = []
    for key in before:
        if key.endswith(COUNT) and key in after:
            example_sets.append(
                example_set(key.removeprefix(EVALUATED).removesuffix(COUNT), before, after)
            )
    return example_sets


def example_set(name: str, before: Content, after: Content) -> ExampleSet:
    """A set from the lines of its first and its last evaluation."""

    def both(*suffixes: str) -> tuple[float, float] | None:
        for suffix in suffixes:
            key = f"{EVALUATED}{name}_{suffix}"
            if key in before and key in after:
                return before[key], after[key]
        return None

    rewards = both("rewards/chosen")
    likelihoods = both("logps/chosen")
    has_reference = False
    if rewards and likelihoods:
        has_reference = abs(rewards[0]) <= NOISE * abs(likelihoods[0])
    return ExampleSet(
        name=name,
        examples=int(after[f"{EVALUATED}{name}{COUNT}"]),
        loss=both("loss"),
        accuracy=both("rewards/accuracies", "accuracy"),
        margin=both("rewards/margins", "margin"),
        reward=both("reward"),
        has_reference=has_reference,
        is_new_head=both(NEW_HEAD) is not None,
    )


MUCH_SKIPPED = 0.1  # share of steps above which the headline reports it
HITS_SHOWN = 5
POINTS_SHOWN = 7
SAMPLES_SHOWN = 3
LONGEST_SAMPLE = 200  # characters


def gives_scores(sets: Sequence[ExampleSet]) -> bool:
    """Whether the model outputs scores instead of text."""
    return bool(sets) and all(examples.is_new_head for examples in sets)


@dataclass(frozen=True)
class WorseDocument:
    hash: str  # xxh3-64 of the text, in hexadecimal digits
    change: float  # bits per byte
    where: str | None = None  # file and line; None until the held-out documents were read again


@dataclass(frozen=True)
class SetVerdict:
    name: str
    is_general: bool
    before: float  # bits per byte
    after: float
    documents: int | None = None
    difference: Difference | None = None
    """None, without an interval, if documents cannot be paired."""
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
    domain: Difference | None
    """Bits per byte over all domain sets."""
    general: Difference | None
    """Bits per byte over all general sets."""
    sources: list[SourceFacts]
    stopped: str | None = None
    """Why the run ended before its budget."""
    skipped_steps: tuple[int, int] = (0, 0)
    """Steps that the loss guard skipped, and all steps."""
    domain_test: list[ScoreReport] = field(default_factory=list)
    tasks: list[ScoreReport] = field(default_factory=list)
    contamination: Contamination | None = None
    retention: list[Point] = field(default_factory=list)
    samples: list[dict[str, str]] = field(default_factory=list)
    """Each prompt, and its continuations before and after."""
    not_run: list[NotRun] = field(default_factory=list)
    serve: str | None = None
    is_complete: bool = False
    """False while it only has the results measured during the run."""
    examples: list[ExampleSet] = field(default_factory=list)
    """Held-out pairs, rated answers and prompts."""
    fallbacks: list[str] = field(default_factory=list)
    """Values that this machine forced, each with its reason."""
    learning_rate: float | None = None
    """Its peak."""
    left_out: list[str] = field(default_factory=list)
    """Very long documents that were not evaluated, a sentence for each set."""
    gain: list[Gain] = field(default_factory=list)
    """On the domain sets that improved."""
    are_documents: bool = True
    """Whether the run trained on documents; False: conversations or pairs."""

    def differences(self, *, is_general: bool) -> dict[str, Difference]:
        """The sets of a kind, by name."""
        differences = {}
        for of_set in self.sets:
            if of_set.is_general == is_general and of_set.difference:
                differences[of_set.name] = of_set.difference
        return differences

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
        if any(map(worked, sets)):
            return None
        return False

    def headline(self) -> str:
        """The result: what was learned, and what was forgotten."""
        return " ".join(self.findings())

    def findings(self) -> list[str]:
        """A sentence on what was learned and one on what was forgotten; more if sets of a kind differ."""
        if self.examples:
            sentences = [examples.sentence() for examples in self.examples]
            if not gives_scores(self.examples):
                cost = [
                    *self.of_kind(general_sentence, self.domain, "held-out domain text"),
                    *self.of_kind(general_sentence, self.general, "held-out general text"),
                ]
                sentences += cost or self.forgetting_not_measured("text")
        elif self.domain is None:
            sentences = ["Whether it worked is unknown: no domain documents were compared."]
        else:
            forgetting = self.of_kind(general_sentence, self.general, "general text")
            sentences = [
                *self.of_kind(domain_sentence, self.domain, "domain text"),
                *self.doubts(),
                *(forgetting or self.forgetting_not_measured("general text")),
            ]
        skipped, steps = self.skipped_steps
        if skipped and skipped >= MUCH_SKIPPED * steps:
            sentences.append(self.skipped_sentence())
        return sentences

    def doubts(self) -> list[str]:
        """Sets of which most of the gain may be learned by heart."""
        names = []
        for gain in self.gain:
            if gain.is_copied:
                names.append(f"`{gain.set_name}`")
        if not names:
            return []
        return [
            f"But most of the gain on {', '.join(names)} is in phrases that training documents also have."
        ]

    def forgetting_not_measured(self, kind: str) -> list[str]:
        """A model from new weights has nothing to forget."""
        if self.base:
            return [f"Forgetting was not measured: no {kind} was held out."]
        return []

    def of_kind(
        self, sentence: Callable[[Difference, str], str], together: Difference | None, kind: str
    ) -> list[str]:
        """One sentence on all sets of a kind; one on each if they differ."""
        if together is None:
            return []
        differences = self.differences(is_general=together is self.general)
        if not differ(list(differences.values()), together):
            return list(filter(None, [sentence(together, kind), disagreement(together)]))
        sentences = []
        for name, difference in differences.items():
            sentences += [sentence(difference, f"`{name}`"), disagreement(difference)]
        return list(filter(None, sentences))

    def next_step(self) -> str:
        """The next step: the row of the table in docs/tutorials/your_documents.md, with the paths of this run."""
        against = f" --against {self.base}" if self.base else ""
        return self.remedy().replace("RUN --against BASE", f"{self.model}{against}")

    def remedy(self) -> str:
        """`next_step` before the paths of the run are filled in."""
        general = self.general
        for difference in self.differences(is_general=True).values():
            if difference.outcome() == "worse":
                general = difference
                break
        if self.examples:
            return self.remedy_on_examples(general)
        domain = self.differences(is_general=False)
        return next_step(
            self.domain,
            general,
            [difference.outcome() for difference in domain.values()],
            can_forget=self.base is not None,
            has_copies=self.has_copies,
            are_documents=self.are_documents,
        )

    def remedy_on_examples(self, general: Difference | None) -> str:
        is_reward_model = gives_scores(self.examples)
        if is_reward_model and self.worked:
            return REWARD
        texts = [] if is_reward_model else [self.domain, general]
        if any(text is not None and text.outcome() == "worse" for text in texts):
            return FORGOT_OF_EXAMPLES
        if self.worked:
            return ASK if any(texts) else MEASURE
        rewards = [examples.reward for examples in self.examples if examples.reward is not None]
        if rewards and all(after <= before for before, after in rewards):
            return NO_REWARD
        if self.worked is False:
            intervals = [examples.interval for examples in self.examples if examples.interval]
            if any(high < CHANCE for _, high in intervals):
                return EXCHANGED
            return NOT_LEARNED
        if any(examples.is_too_easy for examples in self.examples):
            return HARDER_PAIRS
        if any(examples.is_against_chance and examples.interval for examples in self.examples):
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
        for entry, of_set in zip(content["sets"], self.sets, strict=True):
            entry["outcome"] = of_set.outcome
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
    general_names = general_sets(recipe.model_dump(mode="json", by_alias=True), inputs)
    sets, domain, general = compare_sets(folder, course, recipe, general_names)
    missing = not_measured(folder, recipe, sets, examples, evaluation)
    if contamination is None:
        missing["contamination"] = "training documents were not searched: cpt contamination RECIPE"
    # `domain test of code` in `not_run` is more specific than `domain test`.
    unmentioned = []
    for measurement, reason in missing.items():
        if not any(entry.what.startswith(measurement) for entry in not_run):
            unmentioned.append(NotRun(measurement, reason))
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
    folder: Path, course: Sequence[Point], recipe: Recipe, general: Collection[str]
) -> tuple[list[SetVerdict], Difference | None, Difference | None]:
    """Compare each set that was evaluated before the first step and after the last; and all domain sets together, and
    all general ones (`general`), if documents can be paired."""
    if not course or course[0].step != 0:
        return [], None, None
    losses = losses_of_ends(folder)
    after = course[-1].bits_per_byte
    sets = []
    for name, before in course[0].bits_per_byte.items():
        if name not in after:
            continue
        of_set = SetVerdict(name, name in general, before, after[name])
        if name in losses:
            of_set = with_losses(of_set, *losses[name])
        sets.append(of_set)
    paired = [of_set for of_set in sets if of_set.difference]
    general_names = [of_set.name for of_set in paired if of_set.is_general]
    domain_names = [of_set.name for of_set in paired if not of_set.is_general]
    weights = domain_weights(recipe, domain_names)
    return (
        sets,
        difference_together(domain_names, losses, weights),
        difference_together(general_names, losses),
    )


def with_losses(of_set: SetVerdict, before: DocumentLosses, after: DocumentLosses) -> SetVerdict:
    """Add the difference, if it has an interval."""
    num_documents = len(before.hashes)
    if num_documents < FEWEST:
        return replace(of_set, documents=num_documents)
    difference = bits_per_byte_difference([before], [after])
    return replace(
        of_set,
        before=difference.before,
        after=difference.after,
        documents=num_documents,
        difference=difference,
        worst=worst_documents(before, after),
    )


def difference_together(
    names: Sequence[str],
    losses: Mapping[str, tuple[DocumentLosses, DocumentLosses]],
    weights: Sequence[float] | None = None,
) -> Difference | None:
    if not names:
        return None
    before = [losses[name][0] for name in names]
    after = [losses[name][1] for name in names]
    return bits_per_byte_difference(before, after, weights)


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
    worst = []
    for number in np.argsort(-changes, kind="stable")[:EXAMPLES]:
        if changes[number] > 0:
            worst.append(WorseDocument(f"{before.hashes[number]:016x}", float(changes[number])))
    return worst


def not_measured(
    folder: Path,
    recipe: Recipe,
    sets: Sequence[SetVerdict],
    examples: Sequence[ExampleSet],
    evaluation: EvaluationReport | None,
) -> dict[str, str]:
    """Measurement that was not run -> reason, with the command to run it."""
    against = "" if recipe.model.from_scratch else f" --against {recipe.model.path}"
    evaluation_command = f"cpt evaluate {folder}{against}"
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
    elif not any(of_set.is_general for of_set in sets):
        missing["forgetting"] = (
            "no set of general text was held out. A public one: `evaluation.retain: general`"
        )
    added_names = set(map(reported_name, recipe.evaluation.perplexity))
    added_names -= {of_set.name for of_set in sets}
    added_names -= {of_set.name for of_set in examples}
    if sets and added_names:
        missing[f"change of {', '.join(sorted(added_names))}"] = (
            f"added during the run: no result before it. {evaluation_command}"
        )
    unpaired = ", ".join(of_set.name for of_set in sets if of_set.difference is None)
    if unpaired:
        missing[f"intervals of {unpaired}"] = (
            f"losses per document are missing, or there is one document. {evaluation_command}"
        )
    if (sets or not examples) and (evaluation is None or not evaluation.domain_test):
        missing["domain test"] = f"not requested: {evaluation_command} --domain-test SET"
    if evaluation is None or not evaluation.tasks:
        missing["benchmarks"] = (
            f"not requested (`evaluation.tasks`): {evaluation_command} --task hellaswag --task mmlu"
        )
    return missing


def source_facts(inputs: Content) -> list[SourceFacts]:
    sources = []
    for name, facts in inputs.get("data", {}).get("sources", {}).items():
        dropped = facts["dropped"].items()
        source = SourceFacts(
            name=name,
            documents=facts["documents"],
            share=facts["share"],
            licence=facts["licence"],
            decontaminated=sum(count for reason, count in dropped if reason.startswith(REASON)),
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
        message = f"The verdict cannot be written: {problem.strerror}. Again: cpt verdict {folder}"
        record_event(folder, "not_written", message)


def verdict_page(verdict: Verdict) -> str:
    environment = Environment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["cell"] = lambda text: text.replace("|", "\\|")
    environment.filters |= {"sample": sample, "signed": signed}
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
    numbers = {round(index * last / (count - 1)) for index in range(count)}
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
    if not line.strip(" ↵"):
        return "(nothing)"
    if len(text) > LONGEST_SAMPLE:
        line += "..."
    return f"`{line}`"
