"""Hugging Face's own OpenAI-compatible server (`transformers serve`), started in this process for one model and
stopped in order."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute

from cpt.errors import LaunchError
from cpt.serving.checks import Servable
from cpt.serving.requests import check_requests

WAIT_SECONDS = 0.05
SECONDS_TO_FINISH = 20
EVERY_ADDRESS = ("0.0.0.0", "::")


@contextmanager
def serving(
    model: Servable, *, host: str, port: int, dtype: str, device: str, log_level: str = "error"
) -> Iterator[str]:
    """Load the model and serve it while inside; gives the URL.

    Raises:
        LaunchError: the server did not come up.
    """
    from transformers.cli.serve import Serve

    logging.getLogger("uvicorn.error").addFilter(is_warning)  # a filter, since uvicorn sets levels anew when it starts
    try:
        serve = Serve(
            model.name, dtype=dtype, device=device, host=host, port=port, log_level=log_level, non_blocking=True
        )
    except (ValueError, RuntimeError, OSError, TypeError) as problem:
        raise LaunchError(
            f"Hugging Face's server cannot load {model.name}: {' '.join(str(problem).split())[:400]}"
        ) from problem
    try:
        check_requests(serve.server.config.app)
        list_only_this(serve.server.config.app, model.name)
        if not model.has_chat_template:
            refuse_chat(serve.server.config.app, model.name)
        logging.getLogger("uvicorn.access").setLevel(logging.WARNING)
        while not serve.server.started:
            if not serve._thread.is_alive():
                raise LaunchError(f"the server on {host}:{port} ended before it was ready; its own words stand above.")
            time.sleep(WAIT_SECONDS)
        shown = "localhost" if host in EVERY_ADDRESS else f"[{host}]" if ":" in host else host
        yield f"http://{shown}:{port}"
    finally:
        serve.server.should_exit = True  # takes no more requests, and finishes those that it has
        serve._thread.join(timeout=SECONDS_TO_FINISH)
        serve.kill_server()


def is_warning(record: logging.LogRecord) -> bool:
    """Not that it starts and stops, which `cpt serve` says itself."""
    return record.levelno >= logging.WARNING


def list_only_this(app: Any, name: str) -> None:
    """Answer /v1/models with the model that is served.

    Hugging Face's own answer lists the Hub's cache, none of which a pinned server gives, and fails where there is no
    cache.
    """

    def models() -> dict[str, Any]:
        return {
            "object": "list",
            "data": [{"id": name, "object": "model", "created": int(time.time()), "owned_by": "cpt"}],
        }

    app.router.routes.insert(0, APIRoute("/v1/models", models, methods=["GET"]))


def refuse_chat(app: Any, name: str) -> None:
    """Answer chats to a model without a template with the endpoint to ask instead; Hugging Face's server would fail
    with code 500."""
    message = f"{name} has no chat template: it continues text. Ask /v1/completions with a `prompt` instead."

    def refuse() -> JSONResponse:
        return JSONResponse({"error": {"message": message, "type": "invalid_request_error"}}, status_code=400)

    for path in ("/v1/chat/completions", "/v1/responses"):
        app.router.routes.insert(0, APIRoute(path, refuse, methods=["POST"]))
