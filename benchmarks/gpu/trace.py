"""`python -m benchmarks.gpu.trace TRACE`: the longest gaps of the GPU's timeline in a saved trace.

Each gap comes with what the host did in it.

A trace is torch.profiler's, of two steps, in Chrome's format (chrome://tracing and perfetto.dev open it). In a trace
without a GPU the timeline is that of the operators on the CPU.
"""

import argparse
import gzip
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MOST_BYTES = 10_000_000  # of a saved trace
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
OPERATOR = "cpu_op"
OF_HOST = ("cuda_runtime", "cuda_driver", OPERATOR)
LESS_USEFUL = ("ac2g", "fwdbwd", "python_function", OPERATOR)  # arrows first; operators last
LONGEST_GAPS = 12
LONGEST_NAME = 60  # characters
SHORTEST_MS = 0.005  # below it is the time between two launches
Event = dict[str, Any]


@dataclass(frozen=True)
class Gap:
    """A time in which nothing ran on the GPU."""

    begin_ms: float
    """Since the first event of the timeline."""
    milliseconds: float
    after: str
    """The event that ended last before it."""
    before: str
    """The event that ended it."""
    host: str
    """The call of the host that took most of it."""


@dataclass(frozen=True)
class Timeline:
    device: str
    milliseconds: float
    idle_share: float
    gaps: tuple[Gap, ...]
    """The longest ones, the longest first."""


def read_events(path: Path) -> list[Event]:
    """The events that have a duration; times are in microseconds."""
    return [
        event
        for event in read_trace(path)["traceEvents"]
        if event.get("ph") == "X" and "dur" in event
    ]


def read_trace(path: Path) -> dict[str, Any]:
    with gzip.open(path, "rt") as file:
        content: dict[str, Any] = json.load(file)
    return content


def reduce_trace(path: Path, most_bytes: int = MOST_BYTES) -> None:
    """Rewrite a trace that is larger than `most_bytes`, without the events that say least about the GPU.

    Raises:
        ValueError: it is still too large. The file is removed.
    """
    for category in LESS_USEFUL:
        if path.stat().st_size <= most_bytes:
            return
        content = read_trace(path)
        content["traceEvents"] = [
            event for event in content["traceEvents"] if event.get("cat") != category
        ]
        with gzip.open(path, "wt") as file:
            json.dump(content, file)
    size = path.stat().st_size
    if size > most_bytes:
        path.unlink()
        raise ValueError(
            f"{path.name}: {size / 1e6:.1f} MB without the host's operators, over {most_bytes / 1e6:.0f}"
        )


def read_timeline(events: Sequence[Event], count: int = LONGEST_GAPS) -> Timeline:
    """The gaps between all events of the device, whichever stream they ran on."""
    device = "GPU"
    on_device = [event for event in events if event.get("cat") in ON_DEVICE]
    if not on_device:
        device, on_device = "CPU", [event for event in events if event.get("cat") == OPERATOR]
    if not on_device:
        return Timeline(device="none", milliseconds=0.0, idle_share=0.0, gaps=())
    on_device.sort(key=lambda event: event["ts"])
    host = [event for event in events if event.get("cat") in OF_HOST] if device == "GPU" else []
    begin, last = on_device[0]["ts"], on_device[0]
    end = last["ts"] + last["dur"]
    gaps: list[tuple[float, float, Event, Event]] = []
    for event in on_device[1:]:
        if event["ts"] > end:
            gaps.append((event["ts"] - end, end, last, event))
        if event["ts"] + event["dur"] > end:
            last, end = event, event["ts"] + event["dur"]
    gaps.sort(key=lambda gap: -gap[0])
    idle = sum(length for length, *_ in gaps)
    longest = [
        Gap(
            begin_ms=round((at - begin) / 1e3, 3),
            milliseconds=round(length / 1e3, 3),
            after=short_name(before),
            before=short_name(after),
            host=longest_call(host, at, at + length),
        )
        for length, at, before, after in gaps[:count]
        if length / 1e3 >= SHORTEST_MS
    ]
    duration = end - begin
    return Timeline(
        device=device,
        milliseconds=round(duration / 1e3, 3),
        idle_share=round(idle / duration, 4) if duration else 0.0,
        gaps=tuple(longest),
    )


def longest_call(host: Iterable[Event], begin: float, end: float) -> str:
    """The innermost call that fills half of a gap; otherwise the one that fills most of it."""
    longest, filling = ("", 0.0), ("", float("inf"))
    for event in host:
        shared = min(end, event["ts"] + event["dur"]) - max(begin, event["ts"])
        if shared > longest[1]:
            longest = (short_name(event), shared)
        if 2 * shared > end - begin and event["dur"] < filling[1]:
            filling = (short_name(event), event["dur"])
    return filling[0] or longest[0]


def short_name(event: Event) -> str:
    return str(event["name"])[:LONGEST_NAME]


def summarize_trace(path: Path) -> dict[str, Any]:
    """A trace's timeline as JSON."""
    return asdict(read_timeline(read_events(path)))


def format_timeline(timeline: dict[str, Any]) -> str:
    """The gaps as a table."""
    device, idle = timeline["device"], timeline["idle_share"]
    lines = [
        f"trace of two steps: {timeline['milliseconds']:.1f} ms, nothing on the {device} for {idle:.1%} of it"
    ]
    for gap in timeline["gaps"]:
        host = f", host in {gap['host']}" if gap["host"] else ""
        lines.append(
            f"{gap['milliseconds']:8.3f} ms at {gap['begin_ms']:9.3f}: "
            f"after {gap['after']}, before {gap['before']}{host}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.trace", description=__doc__)
    parser.add_argument("trace", type=Path, help="a file trace-*.json.gz")
    print(format_timeline(summarize_trace(parser.parse_args().trace)))


if __name__ == "__main__":
    main()
