"""Rows of an HTTP service that gives JSON page by page: `path: cpt.data.readers.http_api:pages` with the service in
`options`."""

import os
import socket
import time
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError
from urllib.parse import urlencode, urljoin, urlsplit, urlunsplit
from urllib.request import Request, urlopen

import orjson
from xxhash import xxh3_128_hexdigest

from cpt.data.readers.values import kind
from cpt.data.store.folder import default_cache_dir
from cpt.errors import DataError, RecipeError, ResourceError

FIRST_WAIT_SECONDS = 0.5  # doubled with each try
LONGEST_WAIT_SECONDS = 60.0
TRY_AGAIN = (408, 425, 429)  # besides all from 500 on


def pages(
    *,
    url: str,
    items: str = "",
    next_page: str | None = None,
    page_parameter: str | None = None,
    token_variable: str | None = None,
    tries: int = 6,
    timeout_seconds: float = 60.0,
    cache: str | None = None,
) -> Iterator[object]:
    """The rows of all pages, in order. Pages are kept, so that a second reading asks the service for nothing; delete
    them to ask anew.

    Args:
        url: of the first page.
        items: where the rows stand in a page: `data.rows`; empty where the page is the list itself.
        next_page: where the next page's URL stands, null or absent in the last one: `links.next`.
        page_parameter: or else the name of the query's part that counts 1, 2, 3 ... until a page is empty. Neither:
            there is one page.
        token_variable: environment variable that holds the token for `Authorization: Bearer`.
        tries: how often a page is asked for before giving up.
        cache: folder of the pages; by default `pages` in $CPT_CACHE or ~/.cache/cpt.

    Raises:
        RecipeError: both ways to the next page are given, or the token is not there.
        DataError: the service refuses, gives no JSON, or its pages go in a circle.
        ResourceError: it cannot be reached.
    """
    if next_page and page_parameter:
        raise RecipeError("the source `pages`: give `next_page` or `page_parameter`, not both.")
    if token_variable and token_variable not in os.environ:
        raise RecipeError(
            f"the source `pages`: the environment variable {token_variable} (`token_variable`) is not set."
        )
    token = os.environ[token_variable] if token_variable else None
    folder = Path(cache) if cache else default_cache_dir() / "pages"
    seen: set[str] = set()
    address: str | None = with_page(url, page_parameter, 1)
    while address:
        if address in seen:
            raise DataError(
                f"{address}: this page names itself, or one before it, as the next. Set the source's `next_page`."
            )
        seen.add(address)
        request = Request(address, headers={"Accept": "application/json"})
        if (
            token and urlsplit(address).netloc == urlsplit(url).netloc
        ):  # and never to whom a page or a redirection sends us
            request.add_unredirected_header("Authorization", f"Bearer {token}")
        page = kept_page(request, folder, tries, timeout_seconds)
        rows = part_of(page, items)
        if not isinstance(rows, list):
            raise DataError(
                f"{address}: `{items or 'the page'}` is {kind(rows)}, expected a list of rows. Set the source's"
                " `items`."
            )
        yield from rows
        following = part_of(page, next_page) if next_page else None
        address = urljoin(address, following) if isinstance(following, str) and following else None
        if page_parameter and rows:
            address = with_page(url, page_parameter, len(seen) + 1)


def with_page(url: str, parameter: str | None, number: int) -> str:
    """The URL with the page's number in its query."""
    if not parameter:
        return url
    parts = urlsplit(url)
    return urlunsplit(parts._replace(query="&".join(filter(None, (parts.query, urlencode({parameter: number}))))))


def part_of(page: object, place: str) -> object:
    """What stands at `data.rows` of a page, None where nothing does."""
    for key in filter(None, place.split(".")):
        page = page.get(key) if isinstance(page, dict) else None
    return page


def kept_page(request: Request, folder: Path, tries: int, timeout_seconds: float) -> object:
    """The page as it was kept, or fetched now and kept."""
    url = request.full_url
    file = folder / f"{xxh3_128_hexdigest(url.encode())}.json"
    raw = file.read_bytes() if file.exists() else fetch(request, tries, timeout_seconds)
    try:
        page: object = orjson.loads(raw)
    except orjson.JSONDecodeError as problem:
        raise DataError(f"{url}: this is no JSON ({problem.msg}). Set the source's `url`.") from problem
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_suffix(f".{socket.gethostname()}-{os.getpid()}")
        unfinished.write_bytes(raw)
        unfinished.rename(file)
    return page


def fetch(request: Request, tries: int, timeout_seconds: float) -> bytes:
    """The answer, asked for again while the service is busy or gone."""
    url = request.full_url
    last: Exception | None = None
    for number in range(tries):
        wait = min(LONGEST_WAIT_SECONDS, FIRST_WAIT_SECONDS * 2**number)
        try:
            with urlopen(request, timeout=timeout_seconds) as answer:
                return bytes(answer.read())
        except HTTPError as problem:
            if problem.code < 500 and problem.code not in TRY_AGAIN:
                raise DataError(
                    f"{url}: the service refuses ({problem.code} {problem.reason}). Set the source's `url`."
                ) from problem
            asked = problem.headers.get("Retry-After", "")
            last, wait = problem, min(LONGEST_WAIT_SECONDS, float(asked)) if asked.isdecimal() else wait
        except (OSError, HTTPException) as problem:  # no connection, none in time, or one that broke
            last = problem
        if number + 1 < tries:
            time.sleep(wait)
    raise ResourceError(
        f"{url}: cannot be reached, asked {tries} times ({last}). Start again later: the pages before it are kept."
    ) from last
