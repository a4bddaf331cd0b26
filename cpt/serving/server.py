"""Hugging Face's own OpenAI-compatible server (`transformers serve`), started in this process for one model."""

import json
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

from fastapi import Body, HTTPException, Request, Response
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from jinja2 import TemplateError

from cpt.errors import LaunchError
from cpt.hf_internals import server_thread

WAIT_SECONDS = 0.05
SECONDS_TO_FINISH = 20
EVERY_ADDRESS = ("0.0.0.0", "::")
DEFAULT_MAX_TOKENS = 1024  # of Hugging Face's server
COMPLETIONS, CHATS = "/v1/completions", ("/v1/chat/completions", "/v1/responses")
WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logprobs": (False,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
}
"""Parameters that would change the answer and that Hugging Face's server ignores -> their values without effect."""
Handler = Callable[[Request, dict[str, Any]], Awaitable[Response]]


@contextmanager
def serving(
    model: str, has_chat_template: bool, *, host: str, port: int, dtype: str, device: str, log_level: str = "error"
) -> Iterator[str]:
    """Load the model and serve it; yields the URL.

    Raises:
        LaunchError: the server did not start.
    """
    from transformers.cli.serve import Serve

    logging.getLogger("uvicorn.error").addFilter(is_warning)  # a filter, since uvicorn sets levels when it starts
    try:
        serve = Serve(model, dtype=dtype, device=device, host=host, port=port, log_level=log_level, non_blocking=True)
    except (ValueError, RuntimeError, OSError, TypeError, AssertionError) as problem:  # Assertion: torch without CUDA
        raise LaunchError(
            f"Hugging Face's server cannot load {model}: {' '.join(str(problem).split())[:400]}"
        ) from problem
    try:
        adapt_requests(serve.server.config.app, model, has_chat_template)
        logging.getLogger("uvicorn.access").setLevel(logging.WARNING)
        while not serve.server.started:
            if not server_thread(serve).is_alive():
                raise LaunchError(f"the server on {host}:{port} ended before it was ready; its message is above.")
            time.sleep(WAIT_SECONDS)
        shown = "localhost" if host in EVERY_ADDRESS else f"[{host}]" if ":" in host else host
        yield f"http://{shown}:{port}"
    finally:
        serve.server.should_exit = True  # takes no new requests, and finishes those that it has
        server_thread(serve).join(timeout=SECONDS_TO_FINISH)
        serve.kill_server()


def is_warning(record: logging.LogRecord) -> bool:
    """Without uvicorn's lines about starting and stopping."""
    return record.levelno >= logging.WARNING


def adapt_requests(app: Any, model: str, has_chat_template: bool) -> None:
    """Put routes before Hugging Face's own: requests as OpenAI means them, errors in OpenAI's form, one model."""
    handlers: dict[str, Handler] = {
        route.path: route.endpoint for route in app.router.routes if isinstance(route, APIRoute)
    }

    def models() -> dict[str, Any]:  # Hugging Face's own answer lists the Hub's cache
        entry = {"id": model, "object": "model", "created": int(time.time()), "owned_by": "cpt"}
        return {"object": "list", "data": [entry]}

    app.router.routes.insert(0, APIRoute("/v1/models", models, methods=["GET"]))
    for path in (COMPLETIONS, *CHATS):
        refused = ""
        if path in CHATS and not has_chat_template:
            refused = f"{model} has no chat template: it continues text. Send a `prompt` to {COMPLETIONS} instead."
        route = APIRoute(path, adapted(handlers[path], refused), methods=["POST"], response_model=None)
        app.router.routes.insert(0, route)


def adapted(handler: Handler, refused: str) -> Handler:
    """The handler with a request checked and translated for it."""

    async def answer(request: Request, body: Annotated[dict[str, Any], Body()]) -> Response:
        given = {key: value for key, value in body.items() if value is not None}
        if problem := refused or unsupported(given):
            return error(problem)
        try:
            return await handler(request, translated(given))
        except HTTPException as failed:
            return error(str(failed.detail), failed.status_code)
        except TemplateError as problem:
            return error(f"The chat template does not take these messages: {problem}")
        except (ValueError, TypeError) as problem:  # transformers reads some values only when it generates
            return error(str(problem))

    return answer


def error(message: str, code: int = 400) -> JSONResponse:
    content = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
    return JSONResponse({"error": content}, status_code=code)


def unsupported(body: dict[str, Any]) -> str:
    """A message about the first parameter that the server would ignore; empty if there is none."""
    for name, same in WITHOUT_EFFECT.items():
        if name in body and not any(body[name] == one and type(body[name]) is type(one) for one in same):
            return f"This server does not support `{name}` (got {json.dumps(body[name])[:60]}). Leave it out."
    if not isinstance(body.get("prompt", ""), str) and len(body["prompt"]) != 1:
        return "`prompt`: expected one text. Send one request for each text."
    return ""


def translated(body: dict[str, Any]) -> dict[str, Any]:
    """The request with what Hugging Face's server reads differently from OpenAI's: it samples only if
    `generation_config` says so, takes biases as floats, and streams by default."""
    body = {name: value for name, value in body.items() if name not in WITHOUT_EFFECT}
    body["stream"] = body.get("stream", False)
    if isinstance(body.get("prompt"), list):
        body["prompt"] = body["prompt"][0]
    if "logit_bias" in body:
        body["logit_bias"] = {token: float(bias) for token, bias in body["logit_bias"].items()}
    if body.get("temperature", 1) > 0 and "generation_config" not in body and {"temperature", "top_p"} & body.keys():
        body["generation_config"] = json.dumps({"do_sample": True, "max_new_tokens": DEFAULT_MAX_TOKENS})
    return body
