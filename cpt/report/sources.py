"""Where the training data came from: documents, tokens, licences, what was left out, and what was found of the
evaluation in them."""

from typing import Any

from cpt.report.found import mapping, mappings, number, numbers, text
from cpt.report.record import Record
from cpt.report.telling import told_count, told_share
from cpt.runs.page import Listing, Part, Section, Table

HITS_SHOWN = 20
COLUMNS = ("source", "documents", "tokens", "share", "read", "held out", "left out", "licence", "files")


def sources(record: Record) -> Section:
    """A row for each source; reasons for what was left out; contamination."""
    found = mapping(record.inputs, "data", "sources")
    rows = [source_row(record, name, mapping(one)) for name, one in found.items()]
    parts: list[Part] = [Table(COLUMNS, rows)] if rows else []
    dropped = [
        f"{name}: {told_count(count)} documents left out, {reason}."
        for name, one in found.items()
        for reason, count in numbers(one, "dropped").items()
    ]
    parts += [Listing(dropped)] if dropped else []
    return Section("Training data", [*parts, *contamination(record.verdict)])


def source_row(record: Record, name: str, facts: dict[str, Any]) -> tuple[str, ...]:
    """What the run wrote down of it."""
    tokens, share = number(facts, "tokens"), number(facts, "share")
    times = share * record.tokens / tokens if share and record.tokens and tokens else None
    licence = text(facts, "licence") or licence_in_verdict(record, name)
    return (
        name,
        told_count(number(facts, "documents")),
        told_count(tokens),
        told_share(share),
        "" if times is None else f"{times:.2f} times",
        told_count(number(facts, "held_out")),
        told_count(sum(numbers(facts, "dropped").values())),
        licence or "not given",
        told_count(float(len(mapping(facts, "files")))),
    )


def licence_in_verdict(record: Record, name: str) -> str:
    """Where inputs.json is of a version without it."""
    return next((text(one, "licence") for one in mappings(record.verdict, "sources") if text(one, "name") == name), "")


def contamination(verdict: dict[str, Any]) -> list[Part]:
    """How many training documents hold evaluation documents, and the first of them."""
    found = mapping(verdict, "contamination")
    if not found:
        return []
    counted = {
        (source, one): count
        for source in mapping(found, "counts")
        for one, count in numbers(found, "counts", source).items()
    }
    read, judged = sum(numbers(found, "documents").values()), number(found, "judged")
    head = (
        f"Contamination: {told_count(sum(counted.values()))} of {told_count(read)} training documents hold half or"
        " more of one of "
    )
    head += f"{told_count(judged) or 'the'} evaluation documents, or are half made of one."
    if touched := number(found, "touched"):
        head += f" {told_count(touched)} more share a phrase with one."
    rows = [(source, one, told_count(count)) for (source, one), count in counted.items() if count]
    parts: list[Part] = [head, *([Table(("source", "evaluation set", "documents"), rows)] if rows else [])]
    hits = [
        f"{text(hit, 'where')} ({text(hit, 'source')}) holds {told_share(number(hit, 'share'))} of"
        f" {text(hit, 'set_name')}, {text(hit, 'evaluation_document')}."
        for hit in mappings(found, "hits")[:HITS_SHOWN]
    ]
    return [*parts, *([Listing(hits)] if hits else [])]


def files(record: Record) -> str:
    """Each file with its hash, and those of tokenizer and weights."""
    lines = [
        f"{name}  {path}  xxh3 {digest}"
        for name, one in mapping(record.inputs, "data", "sources").items()
        for path, digest in mapping(one, "files").items()
    ]
    if tokenizer := text(record.inputs, "tokenizer", "xxh3"):
        lines.append(f"tokenizer  {text(record.inputs, 'tokenizer', 'path')}  xxh3 {tokenizer}")
    lines += [
        f"weights  {name}  sha256 {digest}" for name, digest in mapping(record.inputs, "weights", "sha256").items()
    ]
    return "\n".join(lines)
