"""Pages that people read, kept as text: a test compares what is written now with what a person has approved."""

import os
from pathlib import Path

import pytest

RENEW = "CPT_RENEW_APPROVED"


def check_approved(text: str, approved: Path) -> None:
    """Compare with the approved file. `CPT_RENEW_APPROVED=1 pytest FILE` writes it; `git diff` shows the change."""
    if os.environ.get(RENEW):
        approved.write_text(text)
    elif text != approved.read_text():
        difference = [
            f"+{line}"
            for line in text.splitlines()
            if line not in approved.read_text().splitlines()
        ]
        pytest.fail(
            f"{approved.name} is approved otherwise (to renew: {RENEW}=1):\n"
            + "\n".join(difference)
        )
