"""The newest figures of a run, read from the end of its metrics.jsonl, so that a list of runs does not read all that
they ever logged."""

from collections.abc import Iterator
from pathlib import Path

from cpt.runs.metric_lines import as_number, object_of
from cpt.runs.metrics import FILE_NAME

WANTED = ("step", "tokens", "loss", "tokens_per_second")
EVALUATED, UNIT = "eval_", "_bits_per_byte"
CHUNK = 2**18
MOST_BYTES = 32 * 2**20  # an evaluation further back than this is not looked for


def last_figures(folder: Path) -> dict[str, float]:
    """`step`, `tokens`, `loss`, `tokens_per_second`, and each set's `eval_<set>_bits_per_byte` of the newest
    evaluation, if there are."""
    found: dict[str, float] = {}
    evaluated: dict[str, float] = {}
    for line in lines_from_the_end(folder / FILE_NAME):
        is_evaluation = not evaluated and b"_bits_per_byte" in line
        if not is_evaluation and all(name in found for name in WANTED):
            if evaluated:
                break
            continue
        logged = object_of(line)
        if logged is None:
            continue
        figures = {name: value for name in logged if (value := as_number(logged[name])) == value}
        found = {name: figures[name] for name in WANTED if name in figures} | found
        if is_evaluation:
            evaluated = {
                name: value for name, value in figures.items() if name.startswith(EVALUATED) and name.endswith(UNIT)
            }
    return found | evaluated


def lines_from_the_end(path: Path) -> Iterator[bytes]:
    """The last line first; without what a crash left of a line at the very end, if that is no JSON."""
    try:
        with path.open("rb") as file:
            end = file.seek(0, 2)
            rest, first = b"", max(0, end - MOST_BYTES)
            while end > first:
                start = max(first, end - CHUNK)
                file.seek(start)
                rest, *lines = (file.read(end - start) + rest).split(b"\n")
                yield from reversed(lines)
                end = start
            yield rest
    except OSError:
        return
