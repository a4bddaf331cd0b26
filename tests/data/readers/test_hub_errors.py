import errno

import pytest
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import get_session

from cpt.data.readers.hub_errors import Unreachable, broken, cannot_fetch, is_hub_file, what_it_means
from cpt.errors import DataError, ResourceError

FILE = f"hf://datasets/lab/set@{'a' * 40}/data/x.jsonl"


def answered(kind, status):
    """The error for an answer with a status."""
    session = get_session()
    response = type(session.build_request("GET", "http://hub")).__module__.split(".")[0]  # httpx or httpx2
    module = __import__(response)
    return kind("refused", response=module.Response(status, request=module.Request("GET", "http://hub")))


@pytest.mark.parametrize(
    ("kind", "status", "expected", "said"),
    [
        (
            GatedRepoError,
            403,
            ResourceError,
            "lab/set (`k.path`) is gated. Accept its terms at https://huggingface.co/datasets/lab/set",
        ),
        (
            RepositoryNotFoundError,
            401,
            ResourceError,
            "no such dataset or a private one that we may not see (401). Run: hf auth login",
        ),
        (RepositoryNotFoundError, 404, DataError, "neither a local path nor a dataset on the Hub. Set `k.path`"),
        (RevisionNotFoundError, 404, DataError, "no revision `v1` on the Hub. Set `k.revision`"),
        (RemoteEntryNotFoundError, 404, DataError, "Set `k.data_files` or `.revision`"),
        (HfHubHTTPError, 403, ResourceError, "set HF_TOKEN"),
    ],
)
def test_a_refusal_says_what_to_do(kind, status, expected, said):
    meant = what_it_means(answered(kind, status), "lab/set", "v1", "k")
    assert isinstance(meant, expected) and said in str(meant)


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_hub_that_is_busy_is_one_that_is_not_there(status):
    assert isinstance(what_it_means(answered(HfHubHTTPError, status), "lab/set", None, "k"), Unreachable)


def test_the_cause_counts_and_a_file_that_need_not_be_there_does_not():
    wrapped = ValueError("no data files")
    wrapped.__cause__ = answered(HfHubHTTPError, 503)
    assert isinstance(what_it_means(wrapped, "lab/set", None, "k"), Unreachable)
    wrapped.__cause__ = answered(RemoteEntryNotFoundError, 404)
    wrapped.__cause__.__cause__ = answered(HfHubHTTPError, 404)
    assert what_it_means(wrapped, "lab/set", None, "k") is None


def test_a_file_that_cannot_be_fetched_names_the_command_that_can():
    for problem in (
        OfflineModeIsEnabled("offline"),
        LocalEntryNotFoundError("not here"),
        broken()[-1]("connection refused"),
    ):
        meant = cannot_fetch(FILE, problem, "k")
        assert isinstance(meant, ResourceError)
        assert str(meant).endswith(f"hf download lab/set data/x.jsonl --repo-type dataset --revision {'a' * 40}")


def test_a_full_disk_is_said():
    meant = cannot_fetch(FILE, OSError(errno.ENOSPC, "No space left on device"), "k")
    assert (
        isinstance(meant, ResourceError)
        and "cannot be kept (No space left on device)" in str(meant)
        and "HF_HOME" in str(meant)
    )


def test_files_at_a_commit_are_told_from_other_urls():
    assert is_hub_file(FILE) and not any(
        map(is_hub_file, ["hf://datasets/lab/set/x.jsonl", "s3://b/x.jsonl", "a.jsonl"])
    )
