"""Daily prices as text: each day's change, rounded to a step, is a whole number.

    sources:
      - path: examples.sources.prices:prices
        options: {folder: data/prices, symbols: [AAPL, GOOGL], until: "2024-12-31"}

As in Chronos (arxiv.org/abs/2403.07815), values become the words of a small vocabulary. Changes and not prices,
because prices of 10 and of 1,000 move alike.
"""

import csv
import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path


def prices(
    *,
    folder: str,
    symbols: Sequence[str],
    until: str = "9999",
    step_percent: float = 0.1,
    max_percent: float = 20.0,
) -> Iterator[dict[str, str]]:
    """Documents like `AAPL 2020-01-02 2021-01-05\\n3 -12 0 7`: first day, last day, then the changes in steps.

    Args:
        folder: holds SYMBOL.csv for each symbol, with the columns Date (2024-12-31) and Close, sorted by day.
        until: the last day that is read.
        step_percent: 3 means a change of 3 * step_percent, measured as 100 * ln(price / price of the day before).
        max_percent: larger changes are written as this one.
    """
    most = round(max_percent / step_percent)
    for symbol in symbols:
        with (Path(folder) / f"{symbol}.csv").open(newline="") as file:
            days = [
                (row["Date"], float(row["Close"]))
                for row in csv.DictReader(file)
                if row["Date"] <= until
            ]
        steps = [
            round(100 * math.log(after / before) / step_percent)
            for (_, before), (_, after) in pairwise(days)
        ]
        for at in range(0, len(steps), 512):
            values = [max(-most, min(most, step)) for step in steps[at : at + 512]]
            yield {
                "text": f"{symbol} {days[at][0]} {days[at + len(values)][0]}\n{' '.join(map(str, values))}"
            }
