"""Prices as text, for a source `path: cpt.data.time_series:prices`: each day's change, rounded to a step, is a whole
number.

As Chronos does (arxiv.org/abs/2403.07815), values become the words of a small vocabulary, equally wide bins, and a
language model learns them as it learns text. Changes and not prices, because prices of 10 and of 1,000 move alike.
"""

import csv
import math
from collections.abc import Iterator, Sequence
from datetime import date
from itertools import pairwise
from pathlib import Path

from cpt.errors import DataError

Price = tuple[str, float]  # date, price


def prices(
    *,
    folder: str,
    symbols: Sequence[str],
    date_column: str = "Date",
    price_column: str = "Close",
    step_percent: float = 0.1,
    max_percent: float = 20.0,
    values_in_document: int = 512,
    until: str | None = None,
) -> Iterator[dict[str, str]]:
    """Documents like `AAPL 2020-01-02 2021-01-05\\n3 -12 0 7`: the first and last day, then the changes in steps.

    Give `until`, and days that are added to the files later change nothing; without it, stored tokens are used even if files change.

    Args:
        folder: holds a file SYMBOL.csv for each symbol.
        step_percent: width of a bin: 3 stands for a change of 0.3 %, measured as 100 * ln(price / price before).
        max_percent: changes beyond are written as this one.
        values_in_document: changes in one document; the next begins where it ends.
        until: the last day that is read, as 2024-12-31.

    Raises:
        DataError: a file or column is missing, a price is none, or days are not in order.
    """  # noqa: E501
    most = round(max_percent / step_percent)
    for symbol in symbols:
        days = list(read_prices(Path(folder) / f"{symbol}.csv", date_column, price_column, until))
        bins = [round(100 * math.log(after / before) / step_percent) for (_, before), (_, after) in pairwise(days)]
        for at in range(0, len(bins), values_in_document):
            values = [max(-most, min(most, value)) for value in bins[at : at + values_in_document]]
            first, last = days[at][0], days[at + len(values)][0]
            yield {"text": f"{symbol} {first} {last}\n{' '.join(map(str, values))}", "symbol": symbol}


def read_prices(file: Path, date_column: str, price_column: str, until: str | None) -> Iterator[Price]:
    """The days of one file, in order."""
    try:
        with file.open(encoding="utf-8-sig", newline="") as stream:
            rows = csv.DictReader(stream)
            for column in (date_column, price_column):
                if column not in (rows.fieldnames or []):
                    found = ", ".join(rows.fieldnames or [])
                    raise DataError(
                        f"{file}: no column `{column}`. It has: {found}. Set `options.date_column` or"
                        " `options.price_column`."
                    )
            before = ""
            for row in rows:
                where = f"{file}: line {rows.line_num}"
                day, price = day_in(row[date_column], where), price_in(row[price_column], where)
                if day <= before:
                    raise DataError(
                        f"{where}: {day} does not come after {before}. Sort the file by day, each day once."
                    )
                before = day
                if until is None or day <= until:
                    yield day, price
    except OSError as problem:
        known = ", ".join(sorted(path.stem for path in file.parent.glob("*.csv"))) or "no csv file"
        raise DataError(
            f"{file}: cannot be read ({problem.strerror}). {file.parent} has: {known}. Set `options.symbols`."
        ) from problem


def day_in(value: str | None, where: str) -> str:
    """The day of a row, as 2024-12-31; a time after it is left out."""
    try:
        return date.fromisoformat((value or "")[:10]).isoformat()
    except ValueError as problem:
        raise DataError(f"{where}: `{value}` is no day. Expected 2024-12-31.") from problem


def price_in(value: str | None, where: str) -> float:
    """The price of a row: a number above 0."""
    try:
        price = float(value or "")
    except ValueError:
        price = 0.0
    if not 0 < price < math.inf:
        raise DataError(f"{where}: `{value}` is no price. Expected a number above 0; leave days without a price out.")
    return price
