"""`cpt` and `python -m cpt`: Ctrl-C while modules are still imported ends the command without a traceback."""

import signal
import sys

from cpt.interrupts import end_on_signals


def main() -> None:
    if sys.argv[1:2] == ["train"]:
        end_on_signals()
    is_pythons_own = (
        signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )  # ignored under `nohup`
    if is_pythons_own:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from cpt.cli import main as run_typed

    if is_pythons_own:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run_typed()


if __name__ == "__main__":
    main()
