"""The options of `python -m benchmarks.NAME`, read by the benchmark's own parser, which then goes no further."""

import argparse
import contextlib
import importlib
import importlib.util
import io
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest.mock import patch

from documented.blocks import PageError

ROOT = Path(__file__).parents[3]


class WasParsed(BaseException):
    """The parser took the words; what comes after is the benchmark."""


def check_benchmark(module: str, words: Sequence[str], *, lenient: bool) -> None:
    """The module is there and takes these words.

    Raises:
        PageError: it is not there, or refuses them.
    """
    name = main_module(module)
    source = Path(importlib.util.find_spec(name).origin).read_text()  # type: ignore[union-attr,arg-type]
    if "ArgumentParser(" not in source:
        if words and "sys.argv" not in source:
            raise PageError(f"{module} takes no words")
        return
    said = io.StringIO()
    try:
        with stopped_after_parsing(), patch.object(sys, "argv", [module, *words]), contextlib.redirect_stderr(said):
            importlib.import_module(name).main()
    except WasParsed:
        return
    except SystemExit as ended:
        if ended.code and not (lenient and "required" in said.getvalue()):
            raise PageError(said.getvalue().strip().splitlines()[-1]) from None
        return
    raise PageError(f"{module} began without reading its words")


def main_module(module: str) -> str:
    """What `python -m` would run."""
    if str(ROOT) not in sys.path:
        sys.path.append(str(ROOT))
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        spec = None
    if spec is not None and spec.submodule_search_locations is not None:
        module, spec = f"{module}.__main__", importlib.util.find_spec(f"{module}.__main__")
    if spec is None:
        raise PageError(f"there is no {module}")
    return module


@contextlib.contextmanager
def stopped_after_parsing() -> Iterator[None]:
    """Every parser ends the program when it has read the words without a complaint."""

    def and_no_further(parse):
        def stop(self: argparse.ArgumentParser, *arguments: object, **options: object) -> None:
            parse(self, *arguments, **options)
            raise WasParsed

        return stop

    kind = argparse.ArgumentParser
    with (
        patch.object(kind, "parse_args", and_no_further(kind.parse_args)),
        patch.object(kind, "parse_intermixed_args", and_no_further(kind.parse_intermixed_args)),
    ):
        yield
