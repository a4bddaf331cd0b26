"""What runs ran on: versions, code, machine, number of processes."""

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from xxhash import xxh3_64_hexdigest

from cpt.compare.inputs import at, shortened, text_at
from cpt.compare.record import Record
from cpt.compare.rows import Row, Topic, differing
from cpt.runs.folder import Content

NOT_INSTALLED = "not installed"
FILES_NAMED = 4


def versions_topic(records: Sequence[Record]) -> Topic:
    """Python and packages."""
    rows = [row_of_starts("python", records, told_at, "python")]
    rows += [row_of_starts(name, records, version_at, name) for name in names_at(records, "versions")]
    return differing("Versions", rows)


def code_topic(records: Sequence[Record]) -> Topic:
    """Commit and uncommitted changes of the folder that the runs were started in, and the source files of cpt
    itself."""
    rows = [
        row_of_starts("commit", records, commit_of),
        row_of_starts("uncommitted changes", records, changes_of),
        row_of_starts("source files of cpt", records, hash_of_code),
    ]
    return differing("Code", rows)


def machine_topic(records: Sequence[Record]) -> Topic:
    """Hardware, operating system, processes, and the variables that can decide about figures."""
    rows = [row_of_starts(name, records, told_at, name) for name in ("processes", "platform")]
    if not all(at(start, "hardware", "cores") for record in records for start in record.starts):
        rows.append(row_of_starts("processors", records, told_at, "processors"))
    for name in names_at(records, "hardware"):
        rows.append(row_of_starts(name.replace("_", " "), records, told_at, "hardware", name))
    rows += [row_of_starts(f"variable {name}", records, variable_at, name) for name in names_at(records, "variables")]
    return differing("Machine", rows)


def names_at(records: Sequence[Record], key: str) -> list[str]:
    """What any start of any run has there."""
    return list(
        dict.fromkeys(name for record in records for start in record.starts for name in mapping_at(start, key))
    )


def row_of_starts(name: str, records: Sequence[Record], value: Callable[..., str | None], *keys: str) -> Row:
    """What each run found at its start; where a later start found something else, both."""
    return Row(name, tuple(in_order(value(start, *keys) for start in record.starts) for record in records))


def in_order(values: Iterable[str | None]) -> str | None:
    """`2.11, then 2.12`."""
    return ", then ".join(dict.fromkeys(value for value in values if value is not None)) or None


def version_at(start: Content, name: str) -> str | None:
    """None where the record does not tell of the package."""
    versions = mapping_at(start, "versions")
    return None if name not in versions else str(versions[name]) if versions[name] else NOT_INSTALLED


def variable_at(start: Content, name: str) -> str | None:
    """None where the record does not tell of variables."""
    return str(mapping_at(start, "variables").get(name, "not set")) if "variables" in start else None


def commit_of(start: Content) -> str | None:
    """None where nothing is known of it."""
    if "git" in start and start["git"] is None:
        return "no repository"
    return shortened(text_at(start, "git", "commit"))


def hash_of_code(start: Content) -> str | None:
    """Of all source files of the package."""
    return shortened(text_at(start, "code"))


def changes_of(start: Content) -> str | None:
    """Which files, and a hash of what was changed in them. What git does not know is left out: a run's own folder is
    among it."""
    changes, diff = text_at(start, "git", "changes"), text_at(start, "git", "diff")
    if changes is None and diff is None:
        return None
    files = [line[3:] for line in (changes or "").splitlines() if line.strip() and not line.startswith("??")]
    if not files and not diff:
        return "none"
    more = f" and {len(files) - FILES_NAMED} more" if len(files) > FILES_NAMED else ""
    return f"{', '.join(files[:FILES_NAMED])}{more} ({xxh3_64_hexdigest((diff or '').encode())[:8]})".strip()


def mapping_at(content: Any, *keys: str) -> Content:
    """Empty where there is none."""
    found = at(content, *keys)
    return found if isinstance(found, dict) else {}


def told_at(content: Any, *keys: str) -> str | None:
    """In one line, None where there is nothing; of several alike how many."""
    found = at(content, *keys)
    if isinstance(found, list):
        counts = {str(one): found.count(one) for one in found}
        return ", ".join(f"{count} x {name}" for name, count in counts.items()) or "none"
    return None if found is None else found if isinstance(found, str) else json.dumps(found)
