"""What an error of the Hub means, and what to do about it; without a Hub."""

import httpx
import pytest
from huggingface_hub import errors

from cpt.data.readers.hub import Unreachable, cannot_fetch, cannot_reach, what_it_means
from cpt.errors import DataError, ResourceError


def answered(status, kind=errors.HfHubHTTPError):
    request = httpx.Request("GET", "https://huggingface.co")
    return kind("what the\n Hub says", response=httpx.Response(status, request=request))


def after(problem, cause):
    """The problem, raised because of another."""
    problem.__cause__ = cause
    return problem


KINDS = {
    "revision": (answered(404, errors.RevisionNotFoundError), DataError, "a/b: no revision `v2`"),
    "entry": (answered(404, errors.RemoteEntryNotFoundError), DataError, "a/b: what the Hub says "),
    "gated": (answered(401), ResourceError, r"a/b: .* private or gated \(401\).*HF_TOKEN"),
    "forbidden": (answered(403), ResourceError, r"a/b: .* private or gated \(403\)"),
    "missing": (answered(404), DataError, "a/b: neither a local path nor a dataset on the Hub"),
    "busy": (answered(503), Unreachable, "HTTP status 503"),
    "offline": (ConnectionError("no route.\nmore"), Unreachable, "no route$"),
    "slow": (TimeoutError("too slow"), Unreachable, "too slow"),
    "chained": (after(ValueError("x"), answered(404)), DataError, "a/b: neither a local path"),
    "local entry": (errors.LocalEntryNotFoundError("x"), type(None), "None"),
    "probed": (after(ValueError("x"), errors.EntryNotFoundError("y")), type(None), "None"),
    "other": (ValueError("x"), type(None), "None"),
}


@pytest.mark.parametrize("name", KINDS)
def test_an_error_of_the_hub_has_its_meaning(name):
    problem, kind, begin = KINDS[name]
    found = what_it_means(problem, "a/b", "v2", "k")
    assert type(found) is kind
    with pytest.raises(kind if kind is not type(None) else AssertionError, match=begin):
        raise found or AssertionError("None")


FILE = f"hf://datasets/a/b@{'0' * 40}/c/d.jsonl"


@pytest.mark.parametrize(
    ("problem", "kind", "named"),
    [
        (answered(404), DataError, "^a/b: neither"),
        (
            OSError(28, "No space left"),
            ResourceError,
            r"cannot be saved \(No space left\).*HF_HOME",
        ),
        (ConnectionError("no route"), ResourceError, r"cannot be reached \(no route\)"),
        (ValueError("odd\nmore"), ResourceError, r"cannot be reached \(odd\)"),
    ],
)
def test_a_file_of_the_hub_that_cannot_be_fetched_has_its_remedy(problem, kind, named):
    error = cannot_fetch(FILE, problem, "k")
    with pytest.raises(kind, match=named):
        raise error
    if "reached" in named:
        command = f"hf download a/b c/d.jsonl --repo-type dataset --revision {'0' * 40}"
        assert str(error).startswith(f"{FILE}: ") and str(error).endswith(command)


def test_a_dataset_that_was_never_seen_needs_the_hub():
    error = cannot_reach("a/b", "no route", "data.sources[3]")
    assert type(error) is ResourceError
    assert str(error).startswith("a/b: ") and "no route" in str(error)
    assert "`data.sources[3].path`" in str(error)
