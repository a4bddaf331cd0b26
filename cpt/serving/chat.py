"""`cpt chat MODEL`: Hugging Face's chat in the terminal (`transformers chat`), with the server that it needs started for it."""

import os
import signal
import socket
import subprocess
import sys
from typing import Annotated

import typer
from transformers.utils.logging import disable_progress_bar

from cpt.errors import CheckpointError
from cpt.serving.checks import check_servable
from cpt.serving.serve import Dtype, ModelName

HOST = "127.0.0.1"


def command(
    model: ModelName,
    flags: Annotated[list[str] | None, typer.Argument(help="Of generate: max_new_tokens=200 do_sample=False temperature=0.7")] = None,
    system_prompt: Annotated[str | None, typer.Option(help="What the model is told first.")] = None,
    dtype: Annotated[Dtype, typer.Option(help="What the weights are held in; auto: as they are stored.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda:0.")] = "auto",
) -> None:
    """Chat with a model; !exit or Ctrl-C ends it."""
    disable_progress_bar()
    servable = check_servable(model)
    if not servable.has_chat_template:
        raise CheckpointError(
            f"{servable.name} has no chat template: it continues text, and nothing tells it who speaks. "
            f"Use the completions endpoint (cpt serve {servable.name}), give it a chat_template.jinja, or bring the chat ability back: "
            "cpt merge --method task_arithmetic"
        )
    from cpt.serving.server import serving  # fastapi, which check_servable has found

    with serving(servable, host=HOST, port=free_port(), dtype=dtype, device=device) as url:
        options = [] if system_prompt is None else ["--system-prompt", system_prompt]
        code = run_chat([servable.name, url, *(flags or []), *options])
    raise typer.Exit(code)


def run_chat(words: list[str]) -> int:
    """`transformers chat` in a process of its own, because where HF_HUB_OFFLINE is set it refuses to speak to this machine, too."""
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    signal.signal(signal.SIGINT, lambda number, frame: None)  # Ctrl-C is for the chat, which ends in order
    return subprocess.run([sys.executable, "-m", "transformers.cli.transformers", "chat", *words], env=environment).returncode


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        return int(listener.getsockname()[1])
