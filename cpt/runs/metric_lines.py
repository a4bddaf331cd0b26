"""Parse JSON lines of numbers into columns: many lines at once where they are alike, one by one where they are not.

Nearly all lines of a log have the same keys in the same order, written by Python's json. Then the commas alone tell
where each figure stands, so Arrow's CSV reader finds them in half the time that a JSON reader needs, and skips figures
that are not wanted. Lines of another form, such as evaluations, come back from it and are read by themselves.
"""

import math
from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase
from itertools import chain
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute
import pyarrow.csv
from numpy.typing import NDArray

ALWAYS = ("step", "tokens")
LAST_OF_ASCII = 127
LOOKED_AT = 4  # lines at the beginning, of which the longest tells the form
NO_NUMBERS = (b"NaN", b"Infinity", b"-Infinity")
"""What Python's json writes, and no other reader takes."""

Floats = NDArray[np.float64]
Columns = dict[str, Floats]


class OtherForm(Exception):  # noqa: N818 - it is no error of anybody
    """The lines cannot be read by their commas."""


def columns_of(block: memoryview, names: Collection[str] | None) -> Columns:
    """The columns of a block of whole lines, NaN where a line lacks a figure; always `step` and `tokens`.

    A value that is no finite number counts as not there; a line that is no JSON object is left out.

    Args:
        names: those that are wanted, `eval_*` for all that begin so; all by default.
    """
    try:
        columns = by_commas(block, names)
    except (OtherForm, pa.ArrowInvalid):
        columns = line_by_line(bytes(block).splitlines(), names)
    return {name: lacking(columns) for name in ALWAYS} | columns


def lacking(columns: Columns) -> Floats:
    """A column for lines of which none has the figure."""
    return np.full(len(next(iter(columns.values()), ())), math.nan)


def by_commas(block: memoryview, names: Collection[str] | None) -> Columns:
    """Where most lines have the form of the first ones.

    Raises:
        OtherForm, ArrowInvalid: they have not, or some value is no number.
    """
    keys = keys_of_lines(block)
    places = {name: place for place, name in enumerate(keys) if is_wanted(name, names)}
    others: list[tuple[int, str]] = []

    def set_aside(row: Any) -> str:
        others.append((row.number, row.text))
        return "skip"

    cells = read_cells(block, len(keys), {*places.values(), len(keys) - 1}, set_aside)
    if not pyarrow.compute.all(pyarrow.compute.ends_with(cells[len(keys) - 1], pattern="}")).as_py():
        raise OtherForm
    columns = {name: numbers_of(cells[place], name, place, len(keys)) for name, place in places.items()}
    if not others:
        return columns
    length = len(cells[len(keys) - 1])
    told = [(number - 1 - earlier, line) for earlier, (number, line) in enumerate(others)]
    whole = [(min(place, length), line) for place, line in told if object_of(line) is not None]
    return inserted(columns, length, [place for place, _ in whole], line_by_line([line for _, line in whole], names))


def keys_of_lines(block: memoryview) -> list[str]:
    """The keys of the longest of the first lines.

    Raises:
        OtherForm: there is a comma within a key or a value, or the line is none of json's.
    """
    if not block or np.frombuffer(block, np.uint8).max() > LAST_OF_ASCII:  # all of it is ASCII as json writes it
        raise OtherForm
    first = bytes(block[: 2**16]).split(b"\n", LOOKED_AT)[:LOOKED_AT]
    line = max(first, key=lambda one: one.count(b","))
    content = object_of(line)
    if not content or len(content) != line.count(b",") + 1:
        raise OtherForm
    return list(content)


def read_cells(block: memoryview, num_keys: int, places: set[int], set_aside: Any) -> dict[int, Any]:
    """What stands between the commas at some places, as text with its key."""
    wanted = [str(place) for place in sorted(places)]
    table = pyarrow.csv.read_csv(
        pa.BufferReader(pa.py_buffer(block)),
        read_options=pyarrow.csv.ReadOptions(
            use_threads=False, column_names=[str(place) for place in range(num_keys)], block_size=len(block) + 1
        ),
        parse_options=pyarrow.csv.ParseOptions(quote_char=False, double_quote=False, invalid_row_handler=set_aside),
        convert_options=pyarrow.csv.ConvertOptions(
            include_columns=wanted, column_types=dict.fromkeys(wanted, pa.string()), strings_can_be_null=False
        ),
    )
    return {int(name): table.column(name) for name in wanted}


def numbers_of(cells: Any, name: str, place: int, num_keys: int) -> Floats:
    """Of ` "loss": 2.5` the number.

    Raises:
        OtherForm: some line has another key there.
        ArrowInvalid: some value is no number.
    """
    start = f'{" " if place else "{"}"{name}": '
    if not pyarrow.compute.all(pyarrow.compute.starts_with(cells, pattern=start)).as_py():
        raise OtherForm
    texts = pyarrow.compute.binary_replace_slice(
        cells, 0, len(start), ""
    )  # nine times as fast as utf8_slice_codeunits
    if place == num_keys - 1:
        texts = pyarrow.compute.utf8_rtrim(texts, "}")
    values: Floats = pyarrow.compute.cast(texts, pa.float64()).to_numpy()
    return np.where(np.isfinite(values), values, math.nan)


def inserted(columns: Columns, length: int, places: list[int], others: Columns) -> Columns:
    """With the values of other lines put between them."""
    nothing, none = np.full(length, math.nan), np.full(len(places), math.nan)
    return {
        name: np.insert(columns.get(name, nothing), places, others.get(name, none))
        for name in dict.fromkeys(chain(columns, others))
    }


def line_by_line(lines: Iterable[bytes | str], names: Collection[str] | None) -> Columns:
    """What can be read, whatever the lines are; figures that some line has."""
    read = [content for line in lines if (content := object_of(line)) is not None]
    found = [name for name in dict.fromkeys(chain.from_iterable(read)) if is_wanted(name, names)]
    columns = {
        name: np.array([as_number(content.get(name)) for content in read], dtype=np.float64)
        for name in (*ALWAYS, *found)
    }
    return {name: values for name, values in columns.items() if name in ALWAYS or not np.isnan(values).all()}


def is_wanted(name: str, names: Collection[str] | None) -> bool:
    """By itself, or by a pattern."""
    return (
        names is None or name in ALWAYS or name in names or any(fnmatchcase(name, one) for one in names if "*" in one)
    )


def object_of(line: bytes | str) -> dict[str, Any] | None:
    """The line's object, None where it is none."""
    content = line.encode(errors="replace") if isinstance(line, str) else line
    try:
        read = orjson.loads(content)
    except orjson.JSONDecodeError:
        if not any(word in content for word in NO_NUMBERS):
            return None
        try:
            read = orjson.loads(without_no_numbers(content))
        except orjson.JSONDecodeError:
            return None
    return read if isinstance(read, dict) else None


def without_no_numbers(line: bytes) -> bytes:
    """With null in the place of what JSON does not know."""
    for word in NO_NUMBERS:
        line = line.replace(b": " + word, b": null").replace(b":" + word, b":null")
    return line


def as_number(value: Any) -> float:
    """NaN for whatever is no finite number."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else math.nan
