"""One step as processes of its own: what the pipeline is told, they are told, and their end is waited for."""

import os
import signal
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from cpt.process import FORWARDED, send
from cpt.runs.record import Run
from cpt.runs.signs import forget_signs

SECONDS_BETWEEN_LOOKS = 0.2
KILLED = 128  # what shells add to a signal's number


@dataclass
class StepProcess:
    """Starts a step's command and waits for it.

    Args:
        run: of the step.
        words: the command; it passes signals on to processes of its own.
    """

    run: Run
    words: Sequence[str]
    told: int = 0
    """The signal that was passed on, 0 where there was none."""
    wake: threading.Event = field(default_factory=threading.Event)

    def wait(self) -> int:
        """Run it to its end; the exit code of the run's own process, which launchers change."""
        if self.run.folder.is_dir():
            forget_signs(self.run.folder)
        known = self.run.status().get("updated")
        before = {number: signal.signal(number, self.at_signal) for number in FORWARDED}
        try:
            child = subprocess.Popen(self.words, start_new_session=True)
            passed_on = 0
            while child.poll() is None:
                self.wake.wait(SECONDS_BETWEEN_LOOKS)
                self.wake.clear()
                if self.told and not passed_on:
                    passed_on = self.told
                    send(child.pid, self.told)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        status = self.run.status()
        told = status.get("exit_code") if status.get("updated") != known else None
        code = child.returncode if child.returncode >= 0 else KILLED - child.returncode
        return int(told) if told is not None and code != 0 else code

    def at_signal(self, number: int, _: object) -> None:
        """Noted; the loop passes it on."""
        self.told = self.told or number
        self.wake.set()


def refuse_a_launcher() -> str | None:
    """What to say where a launcher started this process."""
    if "RANK" not in os.environ:
        return None
    return (
        "a pipeline starts its runs' processes itself: type `cpt pipeline FILE`, with --launcher \"accelerate launch"
        ' --config_file FILE".'
    )
