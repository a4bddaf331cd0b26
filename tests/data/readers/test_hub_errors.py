import pytest
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import get_session

from cpt.data.readers.hub import what_it_means
from cpt.errors import DataError, ResourceError


def answered(kind, status):
    """The error for an answer with a status."""
    session = get_session()
    response = type(session.build_request("GET", "http://hub")).__module__.split(".")[0]  # httpx or httpx2
    module = __import__(response)
    return kind("refused", response=module.Response(status, request=module.Request("GET", "http://hub")))


@pytest.mark.parametrize(
    ("kind", "status", "expected", "said"),
    [
        (GatedRepoError, 403, ResourceError, "https://huggingface.co/datasets/lab/set"),
        (RepositoryNotFoundError, 401, ResourceError, "hf auth login"),
        (RepositoryNotFoundError, 404, DataError, "`k.path`"),
        (RevisionNotFoundError, 404, DataError, "`k.revision`"),
        (RemoteEntryNotFoundError, 404, DataError, "`k.data_files`"),
        (HfHubHTTPError, 403, ResourceError, "HF_TOKEN"),
    ],
)
def test_a_refusal_says_what_to_do(kind, status, expected, said):
    meant = what_it_means(answered(kind, status), "lab/set", "v1", "k")
    assert isinstance(meant, expected) and said in str(meant)
