import ctypes
import os
import time

import pytest

from cpt.data.documents.convert import NotConverted
from cpt.data.documents.ingest import run_isolated


def refuse(argument):
    raise NotConverted("encrypted", "with a password")


def fail(argument):
    return {}["missing"]


def take_memory(argument):
    return bytearray(8 * 2**30)


def crash(argument):
    ctypes.string_at(0)


def leave(argument):
    os._exit(3)


def hang_in_c(argument):
    """Python never gets to run a handler in between."""
    libc = ctypes.PyDLL(None)
    while True:
        libc.sleep(1000)


@pytest.mark.parametrize(
    "function, reason, detail",
    [
        (refuse, "encrypted", "with a password"),
        (fail, "the converter failed", "KeyError: 'missing'"),
        (take_memory, "too much memory", "4.0 GiB"),
        (crash, "the converter crashed", "SIGSEGV"),
        (leave, "the converter crashed", "exit code 3"),
    ],
)
def test_what_goes_wrong_becomes_a_reason(function, reason, detail):
    with pytest.raises(NotConverted) as raised:
        run_isolated(function, None, 20.0)
    assert raised.value.reason == reason and detail in raised.value.detail


def test_a_converter_that_hangs_is_ended_even_in_c():
    start = time.monotonic()
    with pytest.raises(NotConverted, match="took too long"):
        run_isolated(hang_in_c, None, 0.2)
    assert time.monotonic() - start < 10
