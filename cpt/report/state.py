"""How a run stands, in a sentence."""

from cpt.report.found import number, text
from cpt.report.record import RECIPE, Record
from cpt.report.telling import told_count
from cpt.runs.folder import DIED


def told_state(record: Record) -> str:
    """Its state, how far it came, and what ended it."""
    state = text(record.status, "state")
    far, message = how_far(record), " ".join(text(record.status, "message").split())
    if state == "finished":
        return f"Finished{far}."
    if state == "failed":
        return f"Failed{far}: {message or text(record.status, 'error') or 'no reason was written down'}"
    if state == "interrupted":
        return f"Interrupted{far}: {message}" if message else f"Interrupted{far}."
    if state == "running":
        return f"Running{far}."
    if state == DIED:
        return (
            f"Died without a word{far}: its process is gone. It goes on from its newest checkpoint: cpt train"
            f" {record.folder / RECIPE}"
        )
    return f"How the run stands is not known{': it came to' + far.removeprefix(' after') if far else ''}."


def how_far(record: Record) -> str:
    """` after 215 of 430 steps and 220,160 tokens`."""
    step, steps = number(record.status, "step") or record.metrics.last("step"), number(record.status, "steps")
    if step is None:
        return ""
    of = f" of {told_count(steps)}" if steps and steps != step else ""
    tokens = f" and {told_count(record.tokens)} tokens" if record.tokens else ""
    return f" after {told_count(step)}{of} steps{tokens}"
