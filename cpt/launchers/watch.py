"""Whether a run still makes progress, as its heartbeat files show from outside.

Each host's supervisor watches the processes of its own host; one on a login node, which has none, watches all.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path

from cpt.runs.record import Run
from cpt.runs.signs import Sign, is_of_this_host, read_signs

LEAST_PATIENCE = 30.0  # seconds without progress in a step
STEPS_OF_PATIENCE = 5  # median steps
SECONDS_TO_BE_GONE = 10.0  # five pulses
# Before the first and after the last step any CPU work counts as progress, in an evaluation each batch, in a save
# nothing.
PATIENCE = {"starting": 3600.0, "first steps": 600.0, "between": 1800.0, "ending": 3600.0}


def patience(sign: Sign) -> float:
    """Seconds without progress after which a process counts as hung."""
    if sign.phase != "training":
        return PATIENCE[sign.phase]
    if sign.seconds_per_step is None:
        return PATIENCE["first steps"]
    return max(LEAST_PATIENCE, STEPS_OF_PATIENCE * sign.seconds_per_step)


@dataclass
class Watch:
    """Finds the process that made no progress for too long, by this machine's clock."""

    folder: Path
    beats: dict[tuple[int, int], tuple[int, float]] = field(default_factory=dict)
    """(rank, pid) -> the last count of progress, and when it was seen first."""
    pulses: dict[tuple[int, int], tuple[int, float]] = field(default_factory=dict)
    """The same for the count that goes up while the process exists."""

    def hung(self, now: float) -> Sign | None:
        """The process with the longest silence beyond its patience, if any.

        While processes start or end, one may work while the others wait for it, so there the last heartbeat of any
        of them counts. On a read-only disk there are no heartbeats; after the run is finished, none are needed: its
        verdict is being made.
        """
        if not os.access(self.folder, os.W_OK):
            self.beats.clear()
            self.pulses.clear()
            return None
        signs = read_signs(self.folder)
        for sign in signs:
            note(self.beats, sign, sign.beats, now)
            note(self.pulses, sign, sign.pulse, now)
        seen = {sign: self.beats[sign.rank, sign.pid][1] for sign in signs}
        last = max(seen.values(), default=now)
        silent = {sign: now - (last if sign.phase in ("starting", "ending") else seen[sign]) for sign in signs}
        own = [sign for sign in signs if is_of_this_host(sign)] or signs
        late = [sign for sign in own if silent[sign] > patience(sign)]
        return (
            max(late, key=lambda sign: silent[sign])
            if late and Run(self.folder).status().get("state") != "finished"
            else None
        )

    def gone(self, now: float) -> list[Sign]:
        """The processes whose heartbeat stopped without a record of their end."""
        signs = [
            sign for sign in read_signs(self.folder) if sign.ended is None and (sign.rank, sign.pid) in self.pulses
        ]
        return [sign for sign in signs if now - self.pulses[sign.rank, sign.pid][1] > SECONDS_TO_BE_GONE]


def note(counts: dict[tuple[int, int], tuple[int, float]], sign: Sign, count: int, now: float) -> None:
    """Note when a process's count was seen first."""
    if counts.get((sign.rank, sign.pid), (-1, now))[0] != count:
        counts[sign.rank, sign.pid] = (count, now)
