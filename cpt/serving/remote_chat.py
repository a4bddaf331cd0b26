"""`cpt chat --url`: chat in the terminal with a server that is running, over OpenAI's API."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer
import yaml

from cpt.errors import LaunchError

if TYPE_CHECKING:
    from openai import OpenAI

EXIT = "!exit"
Message = dict[str, str]


def open_client(url: str) -> "OpenAI":
    """A client of the server at `http://host:port`, with or without `/v1`."""
    from openai import OpenAI

    base = url.rstrip("/").removesuffix("/v1")
    return OpenAI(
        base_url=f"{base}/v1", api_key=os.environ.get("OPENAI_API_KEY", "none"), max_retries=0
    )


def first_model(client: "OpenAI", url: str) -> str:
    """The first model that the server lists; LaunchError if there is no answer."""
    with server_errors(url):
        models = client.models.list().data
    if not models:
        raise LaunchError(
            f"the server at {url} lists no model. Name one: cpt chat MODEL --url {url}"
        )
    return models[0].id


def chat_in_terminal(
    client: "OpenAI", url: str, model: str, options: Mapping[str, Any], system_prompt: str | None
) -> None:
    """Answer one line after the other until `!exit`, Ctrl-C or the end of the input."""
    messages: list[Message] = []
    if system_prompt is not None:
        messages.append({"role": "system", "content": system_prompt})
    typer.echo(f"Chatting with {model} at {url}. {EXIT} or Ctrl-C ends it.")
    try:
        while True:
            text = input("> ").strip()
            if text == EXIT:
                break
            if not text:
                continue
            messages.append({"role": "user", "content": text})
            answer = ""
            for part in answer_parts(client, url, model, messages, options):
                typer.echo(part, nl=False)
                answer += part
            typer.echo()
            messages.append({"role": "assistant", "content": answer})
    except (EOFError, KeyboardInterrupt):
        typer.echo()


def answer_parts(
    client: "OpenAI", url: str, model: str, messages: list[Message], options: Mapping[str, Any]
) -> Iterator[str]:
    create: Any = client.chat.completions.create  # typed for literal roles
    with server_errors(url):
        stream = create(model=model, messages=messages, stream=True, extra_body=dict(options))
        for chunk in stream:
            if chunk.choices and chunk.choices[0].delta.content:
                yield chunk.choices[0].delta.content


def parse_options(flags: list[str]) -> dict[str, Any]:
    """`{"temperature": 0.7}` from `temperature=0.7`."""
    options: dict[str, Any] = {}
    for flag in flags:
        name, _, value = flag.partition("=")
        options[name] = yaml.safe_load(value)
    return options


@contextmanager
def server_errors(url: str) -> Iterator[None]:
    """Raise a LaunchError for what the network or the server reports."""
    from openai import APIConnectionError, APIError, APIStatusError

    try:
        yield
    except APIConnectionError as problem:
        reason = problem.__cause__ or problem
        raise LaunchError(
            f"cannot reach a server at {url}: {reason}. Start one: cpt serve MODEL, or correct --url."
        ) from problem
    except APIStatusError as problem:
        raise LaunchError(
            f"the server at {url} answered {problem.status_code}: {problem.message}"
        ) from problem
    except APIError as problem:
        raise LaunchError(f"the server at {url} failed: {problem.message}") from problem
