"""`cpt serve MODEL`: an OpenAI-compatible server for one model, checked before it is loaded."""

import json
import shlex
from typing import Annotated, Literal

import typer
from transformers.utils.logging import disable_progress_bar

from cpt.process import ReceivedSignals
from cpt.serving.checks import Servable, check_port, check_servable

Dtype = Literal["auto", "bfloat16", "float16", "float32"]
OwnModule = Annotated[
    str | None, typer.Option("--import", help="Your own package.module that registers the model's family.")
]
ModelName = Annotated[
    str, typer.Argument(help="Folder of an exported model, a finished run, or an id in the Hub's cache.")
]


def command(
    model: ModelName,
    host: Annotated[
        str,
        typer.Option(help="Address to listen on; 0.0.0.0 lets other machines in, and nothing asks them for a key."),
    ] = "localhost",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8000,
    dtype: Annotated[Dtype, typer.Option(help="What the weights are held in; auto: as they are stored.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda:0.")] = "auto",
    module: OwnModule = None,
) -> None:
    """Serve a model until Ctrl-C or SIGTERM.

    It answers as OpenAI's own server does, at /v1/chat/completions and /v1/completions.

    Example: cpt serve runs/my-run --port 8000
    """
    disable_progress_bar()
    servable = check_servable(model, module)
    check_port(host, port)
    from cpt.serving.server import serving  # fastapi, which check_servable has found

    received = ReceivedSignals()
    typer.echo(f"Loading {servable.name} ...")
    with received.noted(), serving(servable, host=host, port=port, dtype=dtype, device=device) as url:
        wait_for_signal(received, ready_lines(servable, url))
    typer.echo("Stopped.")


def wait_for_signal(received: ReceivedSignals, ready: str) -> None:
    """Print that the server is ready, and wait until it is to stop."""
    typer.echo(ready)
    while not received.first:
        received.wait(3600)


def ready_lines(model: Servable, url: str) -> str:
    """The address, and a request to copy."""
    body: dict[str, object] = {"model": model.name, "max_tokens": 64}
    if model.has_chat_template:
        path, offers = "chat/completions", "chat and completions"
        body |= {"messages": [{"role": "user", "content": "Hello!"}]}
    else:
        path, offers = "completions", "completions only: the model has no chat template"
        body |= {"prompt": "Once upon a time"}
    request = shlex.quote(json.dumps(body))
    return (
        f"Ready: {url}/v1 ({offers}). Ctrl-C stops it. Try:\ncurl {url}/v1/{path}"
        f" -H 'Content-Type: application/json' -d {request}"
    )
