"""A disk that is full, as far as a process can tell."""

import resource
from contextlib import contextmanager


@contextmanager
def files_end_at(num_bytes):
    """Within it a write beyond so many bytes of a file fails."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
