"""Rows of an HTTP service that answers in JSON, page by page.

    sources:
      - path: examples.sources.http_api:pages
        options: {url: "https://example.org/articles", items: data.rows, next_page: links.next}

Copy this file and change it to what your service needs. Tokens are stored, so the service is asked only once.
"""

import json
import time
from collections.abc import Iterator
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urljoin
from urllib.request import urlopen

TRIES = 6


def pages(*, url: str, items: str = "", next_page: str = "") -> Iterator[dict[str, Any]]:
    """The rows of all pages, in order.

    Args:
        url: of the first page.
        items: where a page holds its rows, `data.rows`; empty where the page is the list itself.
        next_page: where a page holds the address of the next one, `links.next`; empty where there is one page.
    """
    address: str | None = url
    while address:
        page = json.loads(fetch(address))
        yield from value_at(page, items)
        following = value_at(page, next_page) if next_page else None
        address = urljoin(address, following) if following else None


def value_at(page: Any, place: str) -> Any:
    """What a page holds at `data.rows`."""
    for key in filter(None, place.split(".")):
        page = page.get(key) or {}
    return page


def fetch(address: str) -> bytes:
    """The answer; a busy service is asked again."""
    for number in range(TRIES):
        try:
            with urlopen(address, timeout=60) as answer:
                return bytes(answer.read())
        except HTTPError as problem:
            if problem.code < 500 and problem.code != 429 or number + 1 == TRIES:
                raise
        time.sleep(2**number)
    raise AssertionError
