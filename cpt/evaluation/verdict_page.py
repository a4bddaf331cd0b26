"""The verdict as one page of Markdown, and its files in the run's folder."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from cpt.data.contamination import Contamination
from cpt.errors import ResourceError
from cpt.evaluation.findings import Findings, ScoreFinding
from cpt.evaluation.frontier import plot_frontier
from cpt.evaluation.held_out_examples import ExampleSet
from cpt.evaluation.paired import Difference, Outcome
from cpt.evaluation.verdict import NotRun, SetVerdict, Verdict, dominated, outcome_of_set, percent, verdict_of_run
from cpt.files import write_atomic
from cpt.runs.events import record_event
from cpt.runs.folder import VERDICT, VERDICT_PAGE

FRONTIER = "frontier.png"
HITS_SHOWN, POINTS_SHOWN, SAMPLES_SHOWN = 5, 7, 3


def write_verdict(
    folder: Path,
    *,
    evaluation: Findings | None = None,
    contamination: Contamination | None = None,
    serve: str | None = None,
    not_run: Sequence[NotRun] = (),
    is_complete: bool = False,
) -> Verdict:
    """Judge a finished run, and write verdict.md, verdict.json and, where there is something to draw, frontier.png
    into its folder.

    Args:
        evaluation, contamination, serve, not_run, is_complete: as `verdict_of_run` takes them.
    """
    verdict = verdict_of_run(
        folder,
        evaluation=evaluation,
        contamination=contamination,
        serve=serve,
        not_run=not_run,
        is_complete=is_complete,
    )
    if verdict.is_of_scores:
        verdict = replace(verdict, serve=None)
    general = [one.name for one in verdict.sets if one.is_general]
    if general and len(general) < len(verdict.sets):
        try:
            plot_frontier({verdict.run: verdict.retention}, general, folder / FRONTIER)
            verdict = replace(verdict, frontier=FRONTIER)
        except (ResourceError, OSError) as problem:
            verdict = replace(
                verdict, not_run=[*verdict.not_run, NotRun("the frontier's picture", str(problem).rstrip("."))]
            )
    try:
        write_atomic(folder / VERDICT_PAGE, verdict_page(verdict), reuse_space=True)
        write_atomic(
            folder / VERDICT, json.dumps(verdict.to_json(), indent=2, ensure_ascii=False) + "\n", reuse_space=True
        )
    except OSError as problem:
        record_event(
            folder, "not_written", f"The verdict is not written: {problem.strerror}. Again: cpt verdict {folder}"
        )
    return verdict


def verdict_page(verdict: Verdict) -> str:
    """The whole page; what was not run has its place on it too."""
    parts = [
        f"# Verdict on {verdict.run}",
        f"**{verdict.headline()}**",
        about(verdict),
        section("Held-out examples", examples_table(verdict.examples)),
        section("Held-out text, bits per byte (lower is better)", sets_table(verdict.sets)),
        section("Domain test and benchmarks", scores_table([*verdict.domain_test, *verdict.tasks])),
        section("Domain against general, on the way", retention(verdict)),
        section("Training data", sources_table(verdict)),
        section("Contamination", contamination(verdict)),
        section("What it writes (greedy)", samples(verdict)),
        section("Not run", "\n".join(f"- {one.what}: {one.why}." for one in verdict.not_run)),
        section("Use it", f"```\n{verdict.serve}\n```" if verdict.serve else ""),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def section(title: str, content: str) -> str:
    """Nothing where there is nothing to say."""
    return f"## {title}\n\n{content}" if content else ""


def about(verdict: Verdict) -> str:
    """What was trained, from what, on how much."""
    base = f"from `{verdict.base}`" if verdict.base else "from new weights"
    stopped = f" The run {verdict.stopped}." if verdict.stopped else ""
    skipped = f" {verdict.skipped_sentence()}".rstrip()
    return f"The model in `{verdict.model}` was trained {base} on {verdict.tokens:,} tokens.{stopped}{skipped}"


def examples_table(sets: Sequence[ExampleSet]) -> str:
    """A row for each figure of a set of pairs, judged answers or prompts."""
    rows = []
    for one in sets:
        figures = {"loss": one.loss, "accuracy": one.accuracy, "margin": one.margin, "reward": one.reward}
        for what, figure in figures.items():
            if figure is None:
                continue
            before = "none" if what == "accuracy" and one.has_reference else f"{figure[0]:.4f}"
            interval = (
                f"{one.interval[0]:.3f} to {one.interval[1]:.3f}" if what == "accuracy" and one.interval else "none"
            )
            rows.append((f"{one.name}: {what}", f"{one.examples:,}", before, f"{figure[1]:.4f}", interval))
    return table(("figure", "examples", "before", "after", "95 % interval"), rows) if rows else ""


def sets_table(sets: Sequence[SetVerdict]) -> str:
    """A row for each set, domain first."""
    if not sets:
        return ""
    ordered = sorted(sets, key=lambda one: one.is_general)
    rows = [
        (
            one.name,
            "general" if one.is_general else "domain",
            "?" if one.documents is None else f"{one.documents:,}",
            f"{one.before:.4f}",
            f"{one.after:.4f}",
            f"{100 * (one.after / one.before - 1):+.1f} %",
            "none" if one.difference is None else percent_interval(one.difference),
            worse_share(one.difference),
            (
                "unknown"
                if one.difference is None
                else marked(outcome_of_set(one.difference, is_general=one.is_general), one.difference)
            ),
        )
        for one in ordered
    ]
    titles = ("set", "kind", "documents", "before", "after", "change", "95 % interval", "documents worse", "verdict")
    warnings = [
        f"`{one.name}`: {dominated(one.difference)}"
        for one in ordered
        if one.difference is not None and one.difference.is_dominated
    ]
    return "\n\n".join([table(titles, rows), *warnings])


def scores_table(scores: Sequence[ScoreFinding]) -> str:
    """A row for each kind of question and each metric of a task."""
    if not scores:
        return ""
    rows = [
        (
            score.name,
            score.metric,
            f"{score.questions:,}",
            "" if score.against is None else f"{score.against.before:.3f}",
            f"{score.value:.3f}",
            "none" if score.against is None else f"{score.against.low:+.3f} to {score.against.high:+.3f}",
            (
                "unknown"
                if score.against is None
                else marked(score.against.outcome(higher_is_better=score.higher_is_better), score.against)
            ),
        )
        for score in scores
    ]
    return table(("test", "metric", "questions", "base", "model", "95 % interval of the difference", "verdict"), rows)


def retention(verdict: Verdict) -> str:
    """The picture, or where there is none a few points of the course."""
    if verdict.frontier is not None:
        return f"![Domain against general bits per byte]({verdict.frontier})"
    if len(verdict.retention) < 3:
        return ""
    last = len(verdict.retention) - 1
    shown = sorted({round(place * last / (POINTS_SHOWN - 1)) for place in range(POINTS_SHOWN)})
    names = list(verdict.retention[0].bits_per_byte)
    rows = [
        (
            f"{point.tokens:,}",
            *(f"{point.bits_per_byte[name]:.4f}" if name in point.bits_per_byte else "" for name in names),
        )
        for point in (verdict.retention[place] for place in shown)
    ]
    return table(("tokens", *names), rows)


def sources_table(verdict: Verdict) -> str:
    """A row for each source."""
    if not verdict.sources:
        return ""
    rows = [
        (one.name, f"{one.documents:,}", f"{100 * one.share:.1f} %", one.licence or "not given")
        for one in verdict.sources
    ]
    return table(("source", "documents", "share of the tokens", "licence"), rows)


def contamination(verdict: Verdict) -> str:
    """What was found, the first places, and what was left out of the training for it."""
    left_out = sum(source.decontaminated for source in verdict.sources)
    told = f"{left_out:,} training documents were left out for it." if left_out else ""
    found = verdict.contamination
    if found is None:
        return told
    hits = [
        f"- `{hit.where}` ({hit.source}): {hit.share:.0%} of {hit.set_name}, `{hit.evaluation_document}`"
        for hit in found.hits[:HITS_SHOWN]
    ]
    more = found.num_contaminated - len(hits)
    lines = [*hits, *([f"- and {more:,} more"] if more > 0 else [])]
    return "\n".join([f"{found.summary()} {told}".strip(), *([""] if lines else []), *lines])


def samples(verdict: Verdict) -> str:
    """Side by side: what the base wrote, and what the model writes."""
    rows = [
        [in_a_cell(text) for text in (one.prompt, one.before, one.after)] for one in verdict.samples[:SAMPLES_SHOWN]
    ]
    return table(("prompt", "before", "after"), rows, numbers=False) if rows else ""


def in_a_cell(text: str, longest: int = 200) -> str:
    """As code, lines marked by arrows, and not too much of it."""
    told = " ↵ ".join(line for line in text[:longest].replace("`", "'").split("\n"))
    return f"`{told}{'...' if len(text) > longest else ''}`" if told.strip() else "(nothing)"


def marked(outcome: Outcome, difference: Difference) -> str:
    """The outcome, with a mark where few documents were compared."""
    return outcome + (" (few)" if difference.is_clear and difference.is_on_few else "")


def worse_share(difference: Difference | None) -> str:
    """Of the documents, those that need more bits than before."""
    return (
        ""
        if difference is None or difference.num_worse is None
        else f"{100 * difference.num_worse / difference.items:.0f} %"
    )


def percent_interval(difference: Difference) -> str:
    """Of the value before."""
    low, high = (percent(value, difference) for value in (difference.low, difference.high))
    return f"{low:+.1f} to {high:+.1f} %"


def table(titles: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: bool = True) -> str:
    """A table of Markdown.

    Args:
        numbers: stand in the columns after the first.
    """
    marks = ["---", *["---:" if numbers else "---"] * (len(titles) - 1)]
    lines = [titles, marks, *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
