"""Commands of cpt as a user would type them: each is shown, so that it can be copied, and has a process of its own."""

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from cpt.errors import LaunchError, TrainingError
from cpt.hardware import find_gpus

SECONDS_TO_END = 30
Word = str | int | Path


@dataclass(frozen=True)
class Commands:
    """Shows and starts them, all with the same variables of the environment."""

    console: Console
    variables: Mapping[str, str]

    def run(self, *words: Word) -> None:
        """Wait for a command; when this process is told to stop, until the command has saved where it is.

        Raises:
            TrainingError: it failed.
        """
        with subprocess.Popen(self.shown(*words), env=self.environment()) as process:
            try:
                code = process.wait()
            finally:
                end(process)
        if code:
            raise TrainingError(
                f"`cpt {words[0]}` ended with exit code {code}; its own message stands above. Started again, the demo"
                " goes on."
            )

    @contextmanager
    def server(self, *words: Word, ready: str) -> Iterator[str]:
        """A command that stays: gives what it printed once a line begins with `ready`, and ends it in order.

        Raises:
            LaunchError: it ended before that.
        """
        words_to_start = self.shown(*words)
        with subprocess.Popen(words_to_start, env=self.environment(), stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    self.console.print(line.rstrip(), highlight=False, markup=False, soft_wrap=True)
                    if line.startswith(ready):
                        break
                else:
                    raise LaunchError(f"`cpt {words[0]}` ended before it was ready; its own message stands above.")
                yield line.rstrip()
            finally:
                end(process)

    def shown(self, *words: Word) -> list[str]:
        """Print the command; gives the words that start it with this very Python."""
        texts = [str(word) for word in words]
        self.console.print(f"[bold]$[/bold] cpt {shlex.join(texts)}", highlight=False, soft_wrap=True)
        return [sys.executable, "-m", "cpt", *texts]

    def environment(self) -> dict[str, str]:
        """This process's, with ours: nothing may ask the Hub, and DeepSpeed need not warn that it finds no GPU."""
        quiet = (
            {"TOKENIZERS_PARALLELISM": "false"}
            if find_gpus()
            else {"TOKENIZERS_PARALLELISM": "false", "DS_ACCELERATOR": "cpu"}
        )
        return {"HF_HUB_OFFLINE": "1", **quiet, **os.environ, **self.variables}


def end(process: subprocess.Popen[str] | subprocess.Popen[bytes]) -> None:
    """In order, where it has not ended by itself."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(timeout=SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            process.kill()
