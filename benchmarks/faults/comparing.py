"""Hold a run against the undisturbed one: rows, losses and weights, bit for bit."""

import torch

from benchmarks.faults.runs import TrialRun


def same_weights(one: TrialRun, other: TrialRun) -> bool:
    """Whether both exported the same numbers, bit for bit."""
    if not (one.is_done() and other.is_done()):
        return False
    mine, theirs = one.weights(), other.weights()
    return mine.keys() == theirs.keys() and all(
        torch.equal(mine[name], theirs[name]) for name in mine
    )


def wrong_samples(run: TrialRun, straight: TrialRun) -> int:
    """Steps whose rows are not those of the undisturbed run: lost, repeated or others."""
    expected, found = straight.made(), run.made()
    wrong = sum(
        step not in found or found[step].documents != made.documents
        for step, made in expected.items()
    )
    return wrong + len(found.keys() - expected.keys())


def same_losses(run: TrialRun, straight: TrialRun) -> bool:
    """Whether each step, as it was last made, had the losses of the undisturbed run, bit for bit."""
    return {step: made.losses for step, made in run.made().items()} == {
        step: made.losses for step, made in straight.made().items()
    }


def steps_lost(run: TrialRun) -> int:
    """Most steps that a start had to make again."""
    attempts = [attempt for attempt in run.attempts_made() if attempt]
    return max(
        [
            max(0, max(one) - min(other) + 1)
            for one, other in zip(attempts, attempts[1:], strict=False)
        ],
        default=0,
    )
