"""Every private name of DeepSpeed that cpt uses, each with its reason; `USED` is the contract that a test checks.

Read in DeepSpeed 0.19.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# dotted name -> its parameters ("" for what is not called), why, what ends it
USED: dict[str, tuple[str, str, str]] = {
    "deepspeed.DeepSpeedEngine._copy_recovery_script": ("save_path", "save without writing", "an option to omit it"),
}


@contextmanager
def without_recovery_script(engine: Any) -> Iterator[None]:
    """Within it `save_checkpoint` copies no script into the checkpoint's folder, which does not have to exist."""
    engine._copy_recovery_script = lambda save_path: None
    try:
        yield
    finally:
        del engine._copy_recovery_script
