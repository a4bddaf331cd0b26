"""`cpt chat MODEL`: Hugging Face's chat in the terminal (`transformers chat`) with the server that it needs, or a page
in the browser."""

import ast
import json
import os
import signal
import socket
import subprocess
import sys
from typing import Annotated, Any

import typer
from transformers.utils.logging import disable_progress_bar

from cpt.errors import CheckpointError, LaunchError
from cpt.serving.checks import check_servable
from cpt.serving.serve import Dtype, ModelName, OwnModule

HOST, PORT = "127.0.0.1", 7860
MAX_NEW_TOKENS = 256  # of `transformers chat`


def command(
    model: ModelName,
    flags: Annotated[
        list[str] | None, typer.Argument(help="Of generate: max_new_tokens=200 do_sample=False temperature=0.7")
    ] = None,
    browser: Annotated[
        bool,
        typer.Option(
            "--browser",
            help="On a page in the browser: base and trained model side by side, with a chat template or without.",
        ),
    ] = False,
    against: Annotated[
        str | None, typer.Option(help="The other model of the page; by default the base that the run began with.")
    ] = None,
    alone: Annotated[bool, typer.Option("--alone", help="Leave the base out of the page.")] = False,
    host: Annotated[
        str, typer.Option(help="Address of the page; 0.0.0.0 lets other machines in, and nothing asks them for a key.")
    ] = HOST,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the page.")] = PORT,
    system_prompt: Annotated[str | None, typer.Option(help="What the model is told first.")] = None,
    dtype: Annotated[Dtype, typer.Option(help="What the weights are held in; auto: as they are stored.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda:0.")] = "auto",
    module: OwnModule = None,
) -> None:
    """Chat with a model in the terminal, where !exit ends it, or in the browser; Ctrl-C ends both.

    Example: cpt chat runs/my-run
    """
    disable_progress_bar()
    if browser:
        if alone and against is not None:
            raise LaunchError("--alone leaves the other model out, and --against names it. Give one of them.")
        from cpt.serving.browser import chat_in_browser  # torch, which the terminal's process does not need

        chat_in_browser(
            model,
            against,
            alone=alone,
            host=host,
            port=port,
            words=flags or (),
            system_prompt=system_prompt,
            dtype=dtype,
            device=device,
            module=module,
        )
        return
    if alone or against is not None or (host, port) != (HOST, PORT):
        raise LaunchError("--against, --alone, --host and --port are of the page in the browser. Add --browser.")
    if unknown := next((word for word in flags or () if "=" not in word), None):
        raise LaunchError(
            f"`{unknown}`: what goes to the generation is written as name=value, such as max_new_tokens=200."
        )
    servable = check_servable(model, module)
    if not servable.has_chat_template:
        raise CheckpointError(
            f"{servable.name} has no chat template: it continues text, and nothing tells it who speaks. Use the"
            f" completions endpoint (cpt serve {servable.name}), give it a chat_template.jinja, or bring the chat"
            " ability back: cpt merge --method task_arithmetic"
        )
    from cpt.serving.server import serving  # fastapi, which check_servable has found

    with serving(servable, host=HOST, port=free_port(), dtype=dtype, device=device) as url:
        if not sys.stdin.isatty():
            answer_lines(servable.name, url, flags or [], system_prompt)
            return
        options = [] if system_prompt is None else ["--system-prompt", system_prompt]
        code = run_chat([servable.name, url, *(flags or []), *options])
    raise typer.Exit(code)


def answer_lines(name: str, url: str, flags: list[str], system_prompt: str | None) -> None:
    """Answer each line of stdin in one conversation; `transformers chat` would read a line as the answer to a question
    of its own."""
    from openai import OpenAI  # an extra

    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    options = {"do_sample": True, "max_new_tokens": MAX_NEW_TOKENS} | {
        key: value_of(word) for key, _, word in (flag.partition("=") for flag in flags)
    }
    messages: Any = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
    for line in map(str.strip, sys.stdin):
        if line == "!exit":
            return
        if not line:
            continue
        messages.append({"role": "user", "content": line})
        answer = client.chat.completions.create(
            model=name, messages=messages, extra_body={"generation_config": json.dumps(options)}
        )
        messages.append({"role": "assistant", "content": answer.choices[0].message.content})
        typer.echo(messages[-1]["content"])


def value_of(word: str) -> Any:
    """A number or a switch out of a word of the command line."""
    try:
        return ast.literal_eval(word.title() if word.lower() in ("true", "false", "none") else word)
    except (ValueError, SyntaxError):
        return word


def run_chat(words: list[str]) -> int:
    """`transformers chat` in a process of its own, because where HF_HUB_OFFLINE is set it refuses to speak to this
    machine, too."""
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    signal.signal(signal.SIGINT, lambda number, frame: None)  # Ctrl-C is for the chat, which ends in order
    return subprocess.run(
        [sys.executable, "-m", "transformers.cli.transformers", "chat", *words], env=environment
    ).returncode


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        return int(listener.getsockname()[1])
