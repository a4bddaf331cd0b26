"""Watch the memory of a process and of all below it, from outside, so that what is measured does not have to."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

PROC = Path("/proc")
SECONDS_BETWEEN_LOOKS = 0.1


@dataclass
class Watch:
    """The peaks of a process, and of the largest one below it, in MB.

    The kernel's own peak counts each page of a mapped file that was touched, although these can be dropped at any
    moment; `own` leaves them out, but is what was seen in looks, so that a short peak may be missed.
    """

    process: int
    main: float = 0.0
    main_own: float = 0.0
    worker: float = 0.0
    worker_own: float = 0.0
    ended: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> "Watch":
        self.thread = threading.Thread(target=self.look_until_the_end, daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.thread.join()

    def look_until_the_end(self) -> None:
        while not self.ended.wait(SECONDS_BETWEEN_LOOKS):
            self.look()

    def look(self) -> None:
        for process in below(self.process):
            peak, own = memory_of(process)
            if process == self.process:
                self.main, self.main_own = max(self.main, peak), max(self.main_own, own)
            else:
                self.worker, self.worker_own = max(self.worker, peak), max(self.worker_own, own)

    def measured(self) -> dict[str, float]:
        return {
            "own_memory_mb": self.main_own,
            "worker_peak_memory_mb": self.worker,
            "worker_own_memory_mb": self.worker_own,
        }


def below(process: int) -> Iterator[int]:
    """A process and those that it started, and so on; those that ended meanwhile are left out."""
    yield process
    try:
        children = [file.read_text() for file in PROC.glob(f"{process}/task/*/children")]
    except OSError:
        return
    for child in " ".join(children).split():
        yield from below(int(child))


def memory_of(process: int) -> tuple[float, float]:
    """The kernel's peak, and what is the process's own now; zeros when it has ended."""
    try:
        lines = dict(
            line.split(":", 1) for line in (PROC / str(process) / "status").read_text().splitlines()
        )
    except OSError:
        return 0.0, 0.0
    peak, own = (int(lines.get(name, "0").split()[0]) * 1024 / 1e6 for name in ("VmHWM", "RssAnon"))
    return peak, own
