"""Commands of cpt as a user would type them: each is printed, and runs in its own process."""

import importlib.util
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from cpt.errors import LaunchError, TrainingError
from cpt.hardware import find_gpus
from cpt.process import Child

ANSWER_TOKENS = 48
Word = str | int | Path


@dataclass(frozen=True)
class ServedAnswer:
    """A prompt for the served model, and its continuation."""

    prompt: str
    text: str


@dataclass(frozen=True)
class Commands:
    """Prints and starts commands, all with the same environment."""

    console: Console
    variables: Mapping[str, str]

    def run(self, *words: Word) -> None:
        """Wait for a command. A signal is forwarded to it, so that a run can save a checkpoint.

        Raises:
            TrainingError: it failed.
            KeyboardInterrupt: it was stopped by a signal.
        """
        code, forwarded = Child(self.printed(*words), environment=self.environment()).wait_for_end()
        if forwarded:
            raise KeyboardInterrupt
        if code:
            raise TrainingError(
                f"`cpt {words[0]}` ended with exit code {code}; its message is above. Start the demo again to resume."
            )

    def ask_server(self, model: Path, prompt: str) -> ServedAnswer | None:
        """Serve a model, ask it once with OpenAI's client, stop it; None if a package for it is not installed.

        Raises:
            LaunchError: the server did not start.
        """
        if any(importlib.util.find_spec(package) is None for package in ("fastapi", "uvicorn", "openai")):
            missing = "fastapi, uvicorn or openai is not installed (pip install 'cpt[serving]')"
            self.console.print(f"Not served: {missing}.", highlight=False)
            return None
        from openai import DefaultHttpxClient, OpenAI

        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        words = self.printed("serve", model, "--port", port)
        environment = {**os.environ, **self.environment()}
        with subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True) as server:
            try:
                self.wait_until_ready(server)
                url = f"http://localhost:{port}/v1"
                # Without the environment's proxies: the server is on this machine.
                client = OpenAI(base_url=url, api_key="none", http_client=DefaultHttpxClient(trust_env=False))
                self.print(f">>> client = OpenAI(base_url={url!r}, api_key='none')")
                asked: Any = {"model": str(model), "prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0}
                call = ", ".join(f"{name}={value!r}" for name, value in asked.items())
                self.print(f">>> client.completions.create({call})")
                with client:
                    completion = client.completions.create(**asked)
            finally:
                server.terminate()
        answer = ServedAnswer(prompt, completion.choices[0].text)
        self.print(f"{answer.prompt}{answer.text}")
        return answer

    def wait_until_ready(self, server: subprocess.Popen[str]) -> None:
        """Print the server's output up to the line with an example for curl."""
        for line in server.stdout or ():
            self.print(line.rstrip())
            if line.startswith("curl "):
                return
        raise LaunchError("`cpt serve` ended before it was ready; its message is above.")

    def print(self, text: str) -> None:
        """Print a text as it is."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def printed(self, *words: Word) -> list[str]:
        """Print the command; the words that start it with this Python."""
        texts = [str(word) for word in words]
        self.console.print(f"[bold]$[/bold] cpt {shlex.join(texts)}", highlight=False, soft_wrap=True)
        return [sys.executable, "-m", "cpt", *texts]

    def environment(self) -> dict[str, str]:
        """Variables to add: the Hub is not asked, and DeepSpeed does not warn about the missing GPU."""
        quiet = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        if not find_gpus():
            quiet["DS_ACCELERATOR"] = "cpu"
        return {**{key: os.environ.get(key, value) for key, value in quiet.items()}, **self.variables}
