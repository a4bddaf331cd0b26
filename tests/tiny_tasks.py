"""The data of recipes/tiny: tasks small enough to be learned in seconds, whose answers are known."""

import json
from pathlib import Path

TINY = Path(__file__).resolve().parents[1] / "recipes" / "tiny"


def answers() -> list[dict]:
    """What SFT learns: each animal's sound, as a question and its answer."""
    return [json.loads(line) for line in (TINY / "data" / "answers.jsonl").read_text().splitlines()]
