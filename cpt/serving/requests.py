"""Which parameters of OpenAI's API does the server honour? Any other is refused by name, where Hugging Face's server
ignores it."""

import json
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

from fastapi import Body, HTTPException, Request, Response
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from jinja2 import TemplateError
from pydantic import BaseModel, Field, Json, PositiveInt, ValidationError

DEFAULT_MAX_TOKENS = 1024  # of Hugging Face's server
WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "logprobs": (False,),
    "echo": (False,),
    "suffix": ("",),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "stream_options": ({"include_usage": True}, {"include_usage": False}),  # the last chunk always has the usage
    "tools": ([],),
    "tool_choice": ("auto",),
    "parallel_tool_calls": (True,),
    "service_tier": ("auto", "default"),
    "store": (False,),
}
"""Parameter -> values that ask for what the server does anyway."""
FOR_OPENAI = ("user", "metadata", "safety_identifier", "prompt_cache_key")
"""Parameters that tell OpenAI who asks; they do not change an answer."""
REMEDIES = {
    "n": "send the request several times",
    "best_of": "send the request several times",
    "frequency_penalty": (
        """Hugging Face's penalty is another one: `generation_config: '{"repetition_penalty": 1.2}'`"""
    ),
    "presence_penalty": (
        """Hugging Face's penalty is another one: `generation_config: '{"repetition_penalty": 1.2}'`"""
    ),
}


class Sampling(BaseModel, extra="allow"):
    """What all endpoints take."""

    model: str | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=0)] | None = None
    stream: bool | None = None
    generation_config: Json[dict[str, Any]] | None = None


class Completion(Sampling):
    """Parameters of /v1/completions."""

    prompt: str | Annotated[list[str], Field(min_length=1, max_length=1)]
    max_tokens: PositiveInt | None = None
    stop: str | list[str] | None = None


class Chat(Sampling):
    """Parameters of /v1/chat/completions."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    max_tokens: PositiveInt | None = None
    max_completion_tokens: PositiveInt | None = None
    stop: str | list[str] | None = None
    logit_bias: dict[int, float] | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class Answer(Sampling):
    """Parameters of /v1/responses."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: PositiveInt | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


ENDPOINTS: dict[str, type[Sampling]] = {
    "/v1/completions": Completion,
    "/v1/chat/completions": Chat,
    "/v1/responses": Answer,
}
Handler = Callable[[Request, dict[str, Any]], Awaitable[Response]]


def check_requests(app: Any) -> None:
    """Check each request before Hugging Face's handler gets it, and give errors in the form that OpenAI's client
    shows."""
    handlers: dict[str, Handler] = {
        route.path: route.endpoint for route in app.router.routes if isinstance(route, APIRoute)
    }
    for path, parameters in ENDPOINTS.items():
        app.router.routes.insert(
            0, APIRoute(path, checked(handlers[path], parameters), methods=["POST"], response_model=None)
        )


def checked(handler: Handler, parameters: type[Sampling]) -> Handler:
    """The handler behind the check."""

    async def answer(request: Request, body: Annotated[dict[str, Any], Body()]) -> Response:
        given = {key: value for key, value in body.items() if value is not None}
        try:
            return (
                refused(why)
                if (why := refusal(given, parameters))
                else await handler(request, as_hugging_face_takes_it(given))
            )
        except HTTPException as problem:
            return refused(str(problem.detail), problem.status_code)
        except TemplateError as problem:
            return refused(f"The chat template does not take these messages: {problem}")
        except ValueError as problem:  # of transformers, which reads some values only when it generates
            return refused(str(problem))

    return answer


def refused(message: str, code: int = 400) -> JSONResponse:
    """An error as OpenAI's API has it."""
    return JSONResponse(
        {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": None}}, status_code=code
    )


def refusal(body: dict[str, Any], parameters: type[Sampling]) -> str:
    """What the server cannot do of a request, or what is wrong with it; empty if all is well."""
    for name, value in body.items():
        if name in parameters.model_fields or name in FOR_OPENAI:
            continue
        if not any(value == same and type(value) is type(same) for same in WITHOUT_EFFECT.get(name, ())):
            return (
                f"This server does not support `{name}`{in_words(value)}. Leave it"
                f" out{'; ' + REMEDIES[name] if name in REMEDIES else ''}."
            )
    try:
        parameters.model_validate(body)
    except ValidationError as problem:
        error = problem.errors()[0]
        name = str(error["loc"][0])
        if name == "prompt":
            return (
                f"`prompt`: expected one text{in_words(body.get(name))}. Send one request for each text; lists of"
                " tokens are not supported."
            )
        return f"`{name}`: {error['msg']}{in_words(error['input']) if name in body else ''}."
    return ""


def in_words(value: object) -> str:
    """A value behind the name of its parameter."""
    return f" (got {json.dumps(value)[:60]})"


def as_hugging_face_takes_it(body: dict[str, Any]) -> dict[str, Any]:
    """The request with what Hugging Face's server reads otherwise than OpenAI's.

    It samples only if `generation_config` says so, whatever the temperature; it takes biases as floats, and streams
    answers by default.
    """
    body = {
        name: value
        for name, value in body.items()
        if name not in WITHOUT_EFFECT.keys() - {"tools", "logit_bias"} | set(FOR_OPENAI)
    }
    body["stream"] = body.get("stream", False)
    if isinstance(body.get("prompt"), list):
        body["prompt"] = body["prompt"][0]
    if "logit_bias" in body:
        body["logit_bias"] = {token: float(bias) for token, bias in body["logit_bias"].items()}
    if body.get("temperature", 1) > 0 and "generation_config" not in body and {"temperature", "top_p"} & body.keys():
        body["generation_config"] = json.dumps({"do_sample": True, "max_new_tokens": DEFAULT_MAX_TOKENS})
    return body
