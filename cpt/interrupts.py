"""End `cpt train` on a signal outside of its training: at once, with one sentence, as nothing is to be saved.

An exception would not do: libraries catch it, or report it as an error of theirs. Imports nothing of cpt, so that it
holds while the other modules are imported.
"""

import os
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
EXIT_CODE = 75  # of cpt.errors.Interrupted
SUPERVISED = "CPT_SUPERVISED"  # in the environment of a child and its descendants
CONTINUE = "CPT_CONTINUE"  # set for runs started with `--new`, so that all processes print the same command


def replaceable_handlers(numbers: Iterable[int] = SIGNALS) -> dict[int, Any]:
    """The present handlers of these signals, but not of a SIGHUP that is ignored (nohup), which stays so."""
    handlers: dict[int, Any] = {number: signal.getsignal(number) for number in numbers}
    if handlers.get(signal.SIGHUP) == signal.SIG_IGN:
        del handlers[signal.SIGHUP]
    return handlers


def end_like_ctrl_c() -> None:
    """Let SIGTERM and SIGHUP raise KeyboardInterrupt, so that a command can end its processes."""
    for number in replaceable_handlers((signal.SIGTERM, signal.SIGHUP)):
        signal.signal(number, signal.default_int_handler)


def end_on_signals() -> None:
    """Install the handlers; a signal that is ignored (nohup) or handled stays so."""
    end_at_once = EndAtOnce(os.getpid())
    for number in SIGNALS:
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, end_at_once)


@dataclass(frozen=True)
class EndAtOnce:
    process: int  # a forked worker inherits the handler, and prints nothing

    def __call__(self, number: int, _: FrameType | None) -> None:
        is_main_process = os.environ.get("RANK", "0") == "0"
        is_reported = is_main_process and SUPERVISED not in os.environ
        if is_reported and os.getpid() == self.process:
            command = os.environ.get(CONTINUE, "the same command")
            name = signal.Signals(number).name
            text = f"Interrupted: {name} arrived outside of training. To continue: {command}.\n"
            os.write(2, text.encode())  # sys.stderr may be in the middle of a write
        os._exit(EXIT_CODE)
