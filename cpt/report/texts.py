"""What is read rather than drawn: samples before and after, what was not run, how to serve the model, and the run's
record."""

import json
from pathlib import Path

from cpt.report.found import mapping, mappings, number, text
from cpt.report.record import Record, text_of
from cpt.report.sources import files
from cpt.runs.page import Code, Listing, Part, Section, Table

LONGEST = 1200  # characters of a sample
LONGEST_TEXT = 200_000
PROFILES_SHOWN = 5


def samples(record: Record) -> Section:
    """Prompt by prompt: what was written before the first and after the last step."""
    rows = [
        [shortened(text(one, key)) or "(nothing)" for key in ("prompt", "before", "after")]
        for one in mappings(record.verdict, "samples")
    ]
    rows = rows or rows_of_samples(record)
    return Section("What it writes", [Table(("prompt", "before", "after"), rows, has_texts=True)] if rows else [])


def rows_of_samples(record: Record) -> list[list[str]]:
    """Of samples.jsonl: the first and the last continuation of each prompt."""
    by_prompt: dict[str, list[tuple[float, str]]] = {}
    for one in record.samples:
        by_prompt.setdefault(text(one, "prompt"), []).append((number(one, "step") or 0, text(one, "continuation")))
    rows = []
    for prompt, written in by_prompt.items():
        first, last = min(written), max(written)
        after = shortened(last[1]) or "(nothing)" if len(written) > 1 else "(not yet)"
        rows.append([shortened(prompt), shortened(first[1]) or "(nothing)", after])
    return rows


def shortened(content: str) -> str:
    """Not more than a reader compares."""
    return (
        content if len(content) <= LONGEST else f"{content[:LONGEST]} ... ({len(content) - LONGEST:,} more characters)"
    )


def not_run(record: Record) -> Section:
    """What the verdict does not rest on."""
    lines = [f"{text(one, 'what')}: {text(one, 'why').rstrip('.')}." for one in mappings(record.verdict, "not_run")]
    return Section("Not run", [Listing(lines)] if lines else [])


def use(record: Record) -> Section:
    """The command that serves the model."""
    has_model = (record.folder / "final" / "config.json").is_file()
    command = text(record.verdict, "serve") or (f"cpt serve {record.folder / 'final'}" if has_model else "")
    return Section("Use it", [Code(command)] if command else [])


def profiles(folder: Path) -> str:
    """The profiler's tables."""
    return "\n\n".join(
        f"{path.name}\n{text_of(path)}" for path in sorted((folder / "profile").glob("*.txt"))[:PROFILES_SHOWN]
    )[:LONGEST_TEXT]


def kept(record: Record) -> Section:
    """Recipe, versions, hashes, uncommitted changes and profiles, folded."""
    environment = record.environment
    versions = "\n".join(f"{name} {version}" for name, version in mapping(environment, "versions").items() if version)
    variables = "\n".join(f"{name}={value}" for name, value in mapping(environment, "variables").items())
    diff = text(environment, "git", "diff")
    changes = "\n\n".join(part for part in (text(environment, "git", "changes").rstrip(), diff[:LONGEST_TEXT]) if part)
    starts = json.dumps(record.starts, indent=2, ensure_ascii=False) if record.starts else ""
    folded = {
        "The resolved recipe": record.recipe_text,
        "Versions of all packages": versions,
        "Hashes of data, tokenizer and weights": files(record),
        "Variables of the environment that can change figures": variables,
        "Uncommitted changes of the code": changes,
        "Later starts": starts,
        "The dearest operations of the steps that were profiled": profiles(record.folder),
    }
    parts: list[Part] = [Code(content, title) for title, content in folded.items() if content.strip()]
    return Section("The record", parts)
