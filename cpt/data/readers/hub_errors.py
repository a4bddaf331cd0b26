"""What it means when the Hub does not give what was asked of it: it refuses, it has no such thing, or it is not
there."""

import re
from typing import TYPE_CHECKING

from cpt.data.readers.values import first_line
from cpt.errors import CptError, DataError, ResourceError

if TYPE_CHECKING:
    from huggingface_hub.errors import HfHubHTTPError

HUB_FILE = re.compile(r"hf://datasets/([^/]+/[^/@]+)@([0-9a-f]{40})/(.+)")


class Unreachable(Exception):  # noqa: N818 -- it is caught where the Hub is asked
    """The Hub does not answer."""


def parts_of(path: str) -> tuple[str, str, str]:
    """Dataset, commit and name of a file on the Hub."""
    found = HUB_FILE.fullmatch(path)
    assert found is not None, path
    return found[1], found[2], found[3]


def is_hub_file(path: str) -> bool:
    """True for a file of a dataset on the Hub at a commit."""
    return HUB_FILE.fullmatch(path) is not None


def cannot_fetch(path: str, problem: BaseException, key: str) -> CptError:
    """What to say of a file that the Hub does not give us."""
    dataset, commit, file = parts_of(path)
    meant = what_it_means(problem, dataset, commit, key)
    if isinstance(meant, CptError):
        return meant
    if isinstance(problem, OSError) and problem.errno:
        return ResourceError(
            f"{path}: cannot be kept ({problem.strerror}). Make room, or set HF_HOME to another disk."
        )
    return ResourceError(
        f"{path}: not in the Hub's cache, and the Hub cannot be reached ({meant or first_line(problem)}). Where there"
        f" is a network run: hf download {dataset} {file} --repo-type dataset --revision {commit}"
    )


def failures() -> tuple[type[Exception], ...]:
    """What huggingface_hub and `datasets` raise where they find nothing, or not what they expect."""
    return FileNotFoundError, ValueError, RuntimeError, *broken()


def broken() -> tuple[type[Exception], ...]:
    """What huggingface_hub raises when it does not get an answer, or not the one it wants."""
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError

    httpx_error: type[Exception] = HfHubHTTPError.__bases__[0]  # of httpx or httpx2, by its version
    return ConnectionError, TimeoutError, EntryNotFoundError, httpx_error


def what_it_means(
    problem: BaseException | None, dataset: str, revision: str | None, key: str
) -> CptError | Unreachable | None:
    """The first error in a chain that tells whether the Hub refuses or is not there."""
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError

    if isinstance(problem, HfHubHTTPError):
        return refused(dataset, revision, key, problem)
    while problem is not None and not isinstance(
        problem, EntryNotFoundError
    ):  # `datasets` looks for files that need not be there
        if isinstance(problem, HfHubHTTPError):
            return refused(dataset, revision, key, problem)
        if isinstance(problem, broken()):
            return Unreachable(first_line(problem).rstrip("."))
        problem = problem.__cause__ or problem.__context__
    return None


def refused(dataset: str, revision: str | None, key: str, problem: "HfHubHTTPError") -> CptError | Unreachable:
    """What to say when the Hub answers, but not with what was asked for."""
    from huggingface_hub.errors import GatedRepoError, RemoteEntryNotFoundError, RevisionNotFoundError

    status = problem.response.status_code
    if isinstance(problem, GatedRepoError):
        page = f"https://huggingface.co/datasets/{dataset}"
        return ResourceError(
            f"{dataset} (`{key}.path`) is gated. Accept its terms at {page}, then run: hf auth login, or set HF_TOKEN."
        )
    if isinstance(problem, RevisionNotFoundError):
        return DataError(f"{dataset}: no revision `{revision}` on the Hub. Set `{key}.revision`.")
    if isinstance(problem, RemoteEntryNotFoundError):
        return DataError(f"{dataset}: {' '.join(str(problem).split())} Set `{key}.data_files` or `.revision`.")
    if status in (401, 403):
        return ResourceError(
            f"{dataset}: no such local path, and on the Hub no such dataset or a private one that we may not see"
            f" ({status}). Run: hf auth login, or set HF_TOKEN, with a token that may read it; or set `{key}.path`."
        )
    if status == 404:
        return DataError(f"{dataset}: neither a local path nor a dataset on the Hub. Set `{key}.path`.")
    return Unreachable(f"it answers {status}")


def unreachable(dataset: str, key: str, problem: Unreachable) -> str:
    """What to do without the Hub."""
    return (
        f"{dataset}: no such local path, and the Hub cannot be reached: {problem}. "
        f"Go online (HF_HUB_OFFLINE is not 1), or download the dataset and set `{key}.path` to its folder."
    )
