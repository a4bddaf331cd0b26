"""`cpt chat MODEL`: Hugging Face's chat in the terminal (`transformers chat`), or Gradio's page, each with the server
that it needs."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Annotated, Any

import typer
from transformers.utils.logging import disable_progress_bar

from cpt.errors import CheckpointError, LaunchError, ResourceError
from cpt.process import ReceivedSignals
from cpt.serving.checks import Servable, check_port, check_servable
from cpt.serving.serve import Dtype, ModelName, OwnModule, wait_for_signal

HOST, PORT = "127.0.0.1", 7860
MAX_TOKENS = 256  # of a text that a model without a chat template continues


def command(
    model: ModelName,
    flags: Annotated[
        list[str] | None, typer.Argument(help="Of generate: max_new_tokens=200 do_sample=False temperature=0.7")
    ] = None,
    browser: Annotated[bool, typer.Option("--browser", help="On a page in the browser.")] = False,
    host: Annotated[
        str, typer.Option(help="Address of the page; 0.0.0.0 lets other machines in, without a password.")
    ] = HOST,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the page.")] = PORT,
    system_prompt: Annotated[str | None, typer.Option(help="In the terminal: what the model is told first.")] = None,
    dtype: Annotated[Dtype, typer.Option(help="What the weights are held in; auto: as they are stored.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda:0.")] = "auto",
    module: OwnModule = None,
) -> None:
    """Chat with a model in the terminal, where !exit ends it, or in the browser; Ctrl-C ends both.

    Example: cpt chat runs/my-run
    """
    disable_progress_bar()
    if browser and (flags or system_prompt is not None):  # Gradio 6.31 sends a system message in the first turn only
        raise LaunchError(
            "--system-prompt and options of generate are for the terminal. Leave them out, or --browser."
        )
    if not browser and (host, port) != (HOST, PORT):
        raise LaunchError("--host and --port are for the page in the browser. Add --browser.")
    if browser and find_spec("gradio") is None:
        raise ResourceError("the page needs Gradio. Install it: pip install 'cpt[chat]'")
    if unknown := next((word for word in flags or () if "=" not in word), None):
        raise LaunchError(f"`{unknown}`: write it as name=value, such as max_new_tokens=200.")
    servable = check_servable(model, module)
    if browser:
        check_port(host, port)
    elif not servable.has_chat_template:
        raise CheckpointError(
            f"{servable.name} has no chat template: it continues text. Try it in the browser (--browser), use"
            f" completions (cpt serve {servable.name}), give it a chat_template.jinja, or add a chat vector: cpt merge"
            " --method task_arithmetic"
        )
    from cpt.serving.server import serving  # fastapi, which check_servable has found

    typer.echo(f"Loading {servable.name} ...")
    with serving(servable, host=HOST, port=free_port(), dtype=dtype, device=device) as url:
        if browser:
            show_page(servable, url, host, port)
            return
        options = [] if system_prompt is None else ["--system-prompt", system_prompt]
        code = run_chat([servable.name, url, *(flags or []), *options])
    raise typer.Exit(code)


def run_chat(words: list[str]) -> int:
    """`transformers chat` in a process of its own: with HF_HUB_OFFLINE it refuses to connect to this machine, too."""
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    signal.signal(signal.SIGINT, lambda number, frame: None)  # Ctrl-C is for the chat, which ends by itself
    return subprocess.run(
        [sys.executable, "-m", "transformers.cli.transformers", "chat", *words], env=environment
    ).returncode


def show_page(model: Servable, url: str, host: str, port: int) -> None:
    """Serve Gradio's page until a signal."""
    received, page = ReceivedSignals(), build_page(model, url)
    from gradio.themes import Default  # after build_page, which switches Gradio's telemetry off

    theme = Default(font="sans-serif", font_mono="monospace")  # nothing is fetched from Google
    options = {"prevent_thread_lock": True, "quiet": True, "ssr_mode": False, "theme": theme}
    with received.noted():
        page.launch(server_name=host, server_port=port, **options)
        wait_for_signal(received, f"Ready: http://{host}:{port}. Ctrl-C stops it.")
    page.close(verbose=False)
    typer.echo("Stopped.")


def build_page(model: Servable, url: str) -> Any:
    """Gradio's chat with the server; without a chat template, a page that continues text."""
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # read when a page is made
    import gradio
    from openai import OpenAI

    options: dict[str, Any] = {"title": model.name, "api_name": "chat"}
    if model.has_chat_template:
        return gradio.load_chat(f"{url}/v1", model.name, "none", file_types=None, **options)
    client = OpenAI(base_url=f"{url}/v1", api_key="none")

    def continued(text: str, history: list[Any]) -> Iterator[str]:
        written = text
        for part in client.completions.create(model=model.name, prompt=text, max_tokens=MAX_TOKENS, stream=True):
            written += part.choices[0].text
            yield written

    about = "This model has no chat template: it continues the text that you write."
    return gradio.ChatInterface(continued, description=about, **options)


def free_port() -> int:
    """A port that is free now."""
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        return int(listener.getsockname()[1])
