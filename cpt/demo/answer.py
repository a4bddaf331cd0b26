"""One question to a served model, by the client that everybody uses."""

import importlib.util
import socket
from dataclasses import dataclass
from pathlib import Path

from cpt.demo.commands import Commands

USUAL_PORT = 8000
ANSWER_TOKENS = 48


@dataclass(frozen=True)
class Answer:
    """What was asked of the served model, and what came back."""

    prompt: str
    text: str


def ask_server(cpt: Commands, model: Path, prompt: str) -> Answer | None:
    """Serve a model, ask it once, stop it; None where the packages for it are not installed."""
    if any(importlib.util.find_spec(package) is None for package in ("fastapi", "uvicorn", "openai")):
        cpt.console.print(
            "Not served: fastapi, uvicorn or openai is missing (pip install 'cpt[serving]').", highlight=False
        )
        return None
    from openai import DefaultHttpxClient, OpenAI

    port = free_port()
    with cpt.server("serve", model, "--port", port, ready="curl "):
        # Without what the environment says of proxies: the server is on this machine.
        client = OpenAI(
            base_url=f"http://localhost:{port}/v1", api_key="none", http_client=DefaultHttpxClient(trust_env=False)
        )
        cpt.console.print(
            f">>> client = OpenAI(base_url='http://localhost:{port}/v1', api_key='none')\n>>>"
            f" client.completions.create(model={str(model)!r}, prompt={prompt!r}, max_tokens={ANSWER_TOKENS},"
            " temperature=0)",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
        with client:
            completion = client.completions.create(
                model=str(model), prompt=prompt, max_tokens=ANSWER_TOKENS, temperature=0
            )
    answer = Answer(prompt, completion.choices[0].text)
    cpt.console.print(f"{answer.prompt}{answer.text}", highlight=False, markup=False, soft_wrap=True)
    return answer


def free_port() -> int:
    """The one that `cpt serve` takes by itself, or another where that is taken."""
    for port in (USUAL_PORT, 0):
        with socket.socket() as listener:
            try:
                listener.bind(("127.0.0.1", port))
            except OSError:
                continue
            return int(listener.getsockname()[1])
    raise AssertionError("port 0 is always free")
