"""What a rehearsal found, a row for each thing that a run does, and how it is shown."""

import json
import textwrap
from dataclasses import asdict, dataclass
from typing import Literal

from cpt.errors import CptError

Verdict = Literal["ok", "FAILED", "not run"]
STEP, VERDICT, FIGURE = 13, 8, 112  # characters


@dataclass(frozen=True)
class Finding:
    """One row."""

    step: str
    verdict: Verdict
    figure: str
    """What was measured; or what went wrong, where, and what to do."""
    error: str | None = None
    """The class of the remedy."""


def good(step: str, figure: str) -> Finding:
    """It went well."""
    return Finding(step, "ok", figure)


def bad(step: str, problem: CptError | str, error: str = "CptError") -> Finding:
    """It went wrong."""
    kind = type(problem).__name__ if isinstance(problem, CptError) else error
    return Finding(step, "FAILED", str(problem), kind)


def not_run(step: str, why: str) -> Finding:
    """It could not be tried, or there is nothing to try."""
    return Finding(step, "not run", why)


def shown(finding: Finding) -> str:
    """The row as lines of text."""
    said = f"{finding.error}: {finding.figure}" if finding.error else finding.figure
    indent = " " * (STEP + VERDICT)
    lines = [
        line
        for part in said.splitlines()
        for line in textwrap.wrap(part, FIGURE, break_long_words=False, break_on_hyphens=False)
    ]
    return f"{finding.step:<{STEP}}{finding.verdict:<{VERDICT}}" + f"\n{indent}".join(lines)


def as_json(findings: list[Finding], folder: str | None) -> str:
    """For programs."""
    passed = all(finding.verdict != "FAILED" for finding in findings)
    return json.dumps(
        {"passed": passed, "folder": folder, "findings": [asdict(finding) for finding in findings]}, indent=1
    )
