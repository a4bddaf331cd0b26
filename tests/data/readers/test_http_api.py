"""A service on loopback whose pages, failures and requests a test sees."""

import json
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from cpt.data.readers import http_api
from cpt.errors import DataError, RecipeError, ResourceError

PAGES = {
    "/linked": {"data": {"rows": [{"text": "one"}, {"text": "two"}]}, "next": "/linked2?x=1"},
    "/linked2?x=1": {"data": {"rows": [{"text": "three"}]}, "next": None},
    "/counted?per=2&page=1": ["one", "two"],
    "/counted?per=2&page=2": ["three"],
    "/counted?per=2&page=3": [],
    "/circle": {"rows": [], "next": "/circle"},
    "/flaky": ["late"],
}


tokens = set()


@pytest.fixture
def service(monkeypatch, tmp_path):
    """Its address, and the requests that came."""
    requests, failures = Counter(), Counter({"/flaky": 2, "/dead": 99})
    tokens.clear()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            requests[self.path] += 1
            tokens.add(self.headers.get("Authorization"))
            failing = failures[self.path] > 0
            failures[self.path] -= 1
            status = 503 if failing else 200 if self.path in PAGES else 404 if self.path != "/text" else 200
            self.send_response(status)
            self.end_headers()
            self.wfile.write(
                json.dumps(PAGES[self.path]).encode() if self.path in PAGES and not failing else b"no json"
            )

        def log_message(self, *arguments):
            pass

    monkeypatch.setattr(http_api, "FIRST_WAIT_SECONDS", 0.01)
    monkeypatch.setenv("CPT_CACHE", str(tmp_path / "cache"))
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", requests
    server.shutdown()


SOURCE = "cpt.data.readers.http_api:pages"


def test_pages_that_name_the_next_one_are_followed_and_kept(service, texts):
    address, requests = service
    options = {"url": f"{address}/linked", "items": "data.rows", "next_page": "next"}
    assert texts(SOURCE, options=options) == texts(SOURCE, options=options) == ["one", "two", "three"]
    assert set(requests.values()) == {1}


def test_pages_are_counted_until_one_is_empty(service, texts):
    address, _ = service
    assert texts(SOURCE, options={"url": f"{address}/counted?per=2", "page_parameter": "page"}) == [
        "one",
        "two",
        "three",
    ]


def test_the_token_goes_with_each_request(service, texts, monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "secret")
    options = {"items": "data.rows", "next_page": "next", "token_variable": "MY_TOKEN"}
    assert texts(SOURCE, options={"url": f"{service[0]}/linked", **options}) == ["one", "two", "three"]
    assert tokens == {"Bearer secret"}


def test_a_service_that_is_busy_is_asked_again(service, texts):
    address, requests = service
    assert texts(SOURCE, options={"url": f"{address}/flaky"}) == ["late"] and requests["/flaky"] == 3


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"url": "/dead", "tries": 3}, ResourceError, "asked 3 times"),
        ({"url": "/gone"}, DataError, "the service refuses .404"),
        ({"url": "/text"}, DataError, "this is no JSON"),
        ({"url": "/circle", "items": "rows", "next_page": "next"}, DataError, "names itself"),
        ({"url": "/linked", "items": "rows"}, DataError, "`rows` is null, expected a list"),
        ({"url": "/linked", "next_page": "a", "page_parameter": "b"}, RecipeError, "not both"),
        ({"url": "/linked", "token_variable": "NO_SUCH_TOKEN"}, RecipeError, "NO_SUCH_TOKEN"),
    ],
)
def test_what_goes_wrong_is_said(service, read, options, error, message):
    address, _ = service
    with pytest.raises(error, match=message):
        read(SOURCE, options={**options, "url": address + options["url"]})
