"""The options of accelerate, torchrun and deepspeed, read by their own parsers."""

import argparse
import contextlib
import io
from collections.abc import Sequence

from documented.blocks import PageError


def check_launcher(launcher: str, words: Sequence[str], *, lenient: bool) -> tuple[str | None, list[str]]:
    """What the launcher starts, and with which words.

    Args:
        lenient: words may be left out.

    Raises:
        PageError: the launcher would refuse the words.
    """
    if launcher == "accelerate":
        if words[:1] != ["launch"]:
            return None, []
        words = words[1:]
    parser = PARSERS[launcher]
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            options = parser(words)
    except SystemExit as ended:
        complaint = said.getvalue().strip().splitlines()[-1:] or [""]
        if ended.code and not (lenient and "required" in complaint[0]):
            raise PageError(complaint[0]) from None
        return None, []
    started = {name: value for name, value in vars(options).items() if name in ("training_script", "user_script")}
    rest = vars(options).get("training_script_args", vars(options).get("user_args", []))
    return next(iter(started.values()), None), list(rest)


def accelerate(words: Sequence[str]) -> argparse.Namespace:
    """Of `accelerate launch`."""
    from accelerate.commands.launch import launch_command_parser

    return launch_command_parser().parse_args(words)


def torchrun(words: Sequence[str]) -> argparse.Namespace:
    """Of `torchrun`."""
    from torch.distributed.run import get_args_parser

    return get_args_parser().parse_args(words)


def deepspeed(words: Sequence[str]) -> argparse.Namespace:
    """Of `deepspeed`."""
    from deepspeed.launcher.runner import parse_args

    return parse_args(list(words))


PARSERS = {"accelerate": accelerate, "torchrun": torchrun, "deepspeed": deepspeed}
