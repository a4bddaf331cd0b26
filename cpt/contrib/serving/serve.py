"""`cpt serve` and `cpt chat`: Hugging Face's server, with checks for parameters that it would ignore."""

import asyncio
import json
import logging
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import typer
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from jinja2 import TemplateError

from cpt.command_line import hide_transformers_bars
from cpt.errors import CheckpointError, LaunchError, RecipeError, ResourceError, install_line
from cpt.hf_internals import server_thread
from cpt.process import ReceivedSignals, free_port
from cpt.recipe.schema import Model
from cpt.runs.record import EXPORT, RECIPE, Run

WAIT_SECONDS = 0.05
SECONDS_TO_FINISH = 20
EVERY_ADDRESS = ("0.0.0.0", "::")
DEFAULT_MAX_TOKENS = 1024  # Hugging Face's server's default
COMPLETIONS = "/v1/completions"
CHATS = ("/v1/chat/completions", "/v1/responses")
NEUTRAL_VALUES: dict[str, Any] = {
    "n": 1,
    "best_of": 1,
    "echo": False,
    "suffix": "",
    "logprobs": False,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "response_format": {"type": "text"},
}
"""Parameters that Hugging Face's server ignores although they affect the answer -> their neutral values."""
# of the page in the browser
HOST = "127.0.0.1"
PORT = 7860
MAX_TOKENS = 256  # for text completion without a chat template
Dtype = Literal["auto", "bfloat16", "float16", "float32"]
WeightsDtype = Annotated[Dtype, typer.Option(help="Data type of the weights; auto: as stored.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda:0.")]
OwnModule = Annotated[
    str | None, typer.Option("--import", help="package.module that registers the model's family.")
]
ModelName = Annotated[
    str,
    typer.Argument(
        help="Folder of an exported model, a finished run, or an id in the Hub's cache."
    ),
]


@contextmanager
def serving(
    model: str, has_chat_template: bool, *, host: str, port: int, dtype: str, device: str
) -> Iterator[str]:
    """Load the model and serve it; yields the URL. LaunchError if the server does not start."""
    from transformers.cli.serve import Serve

    # Without uvicorn's lines about starting and stopping: by a filter, because uvicorn sets levels at start.
    logging.getLogger("uvicorn.error").addFilter(lambda record: record.levelno >= logging.WARNING)
    try:
        serve = Serve(
            model,
            dtype=dtype,
            device=device,
            host=host,
            port=port,
            log_level="error",
            non_blocking=True,
        )
    # AssertionError: torch without CUDA.
    except (ValueError, RuntimeError, OSError, TypeError, AssertionError) as problem:
        reason = " ".join(str(problem).split())[:400]
        raise LaunchError(f"the server cannot load {model}: {reason}") from problem
    try:
        adapt_requests(serve.server.config.app, model, has_chat_template)
        logging.getLogger("uvicorn.access").setLevel(logging.WARNING)
        while not serve.server.started:
            if not server_thread(serve).is_alive():
                raise LaunchError(
                    f"the server on {host}:{port} exited before it was ready; see its message above."
                )
            time.sleep(WAIT_SECONDS)
        yield url_of(host, port)
    finally:
        serve.server.should_exit = True  # finishes current requests, and refuses new ones
        server_thread(serve).join(timeout=SECONDS_TO_FINISH)
        serve.kill_server()


def url_of(host: str, port: int) -> str:
    if host in EVERY_ADDRESS:
        host = "localhost"
    elif ":" in host:  # IPv6
        host = f"[{host}]"
    return f"http://{host}:{port}"


def adapt_requests(app: Any, model: str, has_chat_template: bool) -> None:
    """Add routes before Hugging Face's: OpenAI's meaning of requests, OpenAI's error format, one model."""
    from fastapi import Body, HTTPException, Request, Response
    from fastapi.responses import JSONResponse
    from fastapi.routing import APIRoute

    handlers: dict[str, Any] = {}
    for route in app.router.routes:
        if isinstance(route, APIRoute):
            handlers[route.path] = route.endpoint

    def models() -> dict[str, Any]:  # Hugging Face's route lists the Hub cache
        entry = {"id": model, "object": "model", "created": int(time.time()), "owned_by": "cpt"}
        return {"object": "list", "data": [entry]}

    def error(message: str, code: int = 400) -> JSONResponse:
        content = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
        return JSONResponse({"error": content}, status_code=code)

    # Hugging Face's server seeds torch when a request arrives, and computes one after the other: without the lock, a
    # request that arrives meanwhile would change the draws of the one before it.
    one_at_a_time = asyncio.Lock()

    def adapted(path: str) -> Any:
        async def answer(request: Request, body: Annotated[dict[str, Any], Body()]) -> Response:
            if path in CHATS and not has_chat_template:
                remedy = f"Send a `prompt` to {COMPLETIONS} instead."
                return error(f"{model} is not a chat model: its chat template is missing. {remedy}")
            try:
                async with one_at_a_time:
                    response: Response = await handlers[path](request, translated(body))
                return response
            except HTTPException as failed:
                return error(str(failed.detail), failed.status_code)
            # The chat template may refuse messages; transformers reads some values only in generation.
            except (TemplateError, ValueError, TypeError) as problem:
                return error(str(problem))

        return answer

    routes = [
        APIRoute(path, adapted(path), methods=["POST"], response_model=None)
        for path in (COMPLETIONS, *CHATS)
    ]
    app.router.routes[:0] = [APIRoute("/v1/models", models, methods=["GET"]), *routes]


def translated(body: dict[str, Any]) -> dict[str, Any]:
    """Translate parameters that Hugging Face's server reads differently from OpenAI's: it samples only if
    `generation_config` says so, expects biases as floats, and streams by default. ValueError for ignored
    parameters."""
    body = {name: value for name, value in body.items() if value is not None}
    for name, neutral in NEUTRAL_VALUES.items():
        # Equal, and of one type: `logprobs: 0` is not false.
        if name in body and (body[name] != neutral or type(body[name]) is not type(neutral)):
            got = json.dumps(body[name])[:60]
            raise ValueError(f"`{name}` is not supported (got {got}). Remove it.")
        body.pop(name, None)
    if not isinstance(body.get("prompt", ""), str):
        if len(body["prompt"]) != 1:
            raise ValueError("`prompt`: expected one text. Send one request per text.")
        body["prompt"] = body["prompt"][0]
    body["stream"] = body.get("stream", False)
    if "logit_bias" in body:
        body["logit_bias"] = {token: float(bias) for token, bias in body["logit_bias"].items()}
    has_sampling_options = "temperature" in body or "top_p" in body
    is_sampled = has_sampling_options and body.get("temperature", 1) > 0
    if is_sampled and "generation_config" not in body:
        config = {"do_sample": True, "max_new_tokens": DEFAULT_MAX_TOKENS}
        body["generation_config"] = json.dumps(config)
    return body


class Servable(NamedTuple):
    name: str  # folder or Hub id, expected as `model` in requests
    has_chat_template: bool


def serve(
    model: ModelName,
    host: Annotated[
        str, typer.Option(help="Address; 0.0.0.0 is open to all, without a key.")
    ] = "localhost",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8000,
    dtype: WeightsDtype = "auto",
    device: Device = "auto",
    module: OwnModule = None,
) -> None:
    """Serve a model until Ctrl-C or SIGTERM.

    It implements OpenAI's API at /v1/chat/completions and /v1/completions.

    Example: cpt serve runs/my-run --port 8000
    """

    hide_transformers_bars()
    servable = check_servable(model, module)
    check_port(host, port)
    received = ReceivedSignals()
    typer.echo(f"Loading {servable.name} ...")
    with (
        received.noted(),
        serving(*servable, host=host, port=port, dtype=dtype, device=device) as url,
    ):
        body: dict[str, object] = {"model": servable.name, "max_tokens": 64}
        if servable.has_chat_template:
            path = "chat/completions"
            offers = "chat and completions"
            body |= {"messages": [{"role": "user", "content": "Hello!"}]}
        else:
            path = "completions"
            offers = "completions only: the chat template is missing"
            body |= {"prompt": "Once upon a time"}
        request = f"{url}/v1/{path} -H 'Content-Type: application/json' -d {shlex.quote(json.dumps(body))}"
        typer.echo(f"Ready: {url}/v1 ({offers}). Ctrl-C stops it. Try:\ncurl {request}")
        wait_for_signal(received)
    typer.echo("Stopped.")


def wait_for_signal(received: ReceivedSignals) -> None:
    while not received.first:
        received.wait(3600)


def chat(
    model: ModelName,
    flags: Annotated[
        list[str] | None, typer.Argument(help="Options: max_new_tokens=200 temperature=0.7")
    ] = None,
    browser: Annotated[
        bool, typer.Option("--browser", help="Open a page for the browser.")
    ] = False,
    host: Annotated[
        str, typer.Option(help="Address of the page; 0.0.0.0: open to all, no password.")
    ] = HOST,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the page.")] = PORT,
    system_prompt: Annotated[
        str | None, typer.Option(help="System prompt, only in the terminal.")
    ] = None,
    dtype: WeightsDtype = "auto",
    device: Device = "auto",
    module: OwnModule = None,
) -> None:
    """Chat with a model in the terminal (!exit quits) or in the browser; Ctrl-C stops both.

    Example: cpt chat runs/my-run
    """
    if browser and (flags or system_prompt is not None):
        # Gradio 6.31 sends a system message in the first turn only.
        raise LaunchError(
            "--system-prompt and generation options need the terminal. Remove them, or --browser."
        )
    if not browser and (host, port) != (HOST, PORT):
        raise LaunchError("--host and --port need --browser. Add it.")
    if browser and find_spec("gradio") is None:
        raise ResourceError(f"the page needs Gradio. Install it: {install_line('chat')}")
    for flag in flags or ():
        if flag and "=" not in flag:
            raise LaunchError(f"`{flag}`: expected name=value, such as max_new_tokens=200.")
    hide_transformers_bars()
    servable = check_servable(model, module)
    if browser:
        check_port(host, port)
    elif not servable.has_chat_template:
        raise CheckpointError(
            f"{servable.name} is missing a chat template. Try it in the browser (--browser), use"
            f" completions (cpt serve {servable.name}), add a chat_template.jinja, or add a chat vector: cpt merge"
            " --method task_arithmetic"
        )
    typer.echo(f"Loading {servable.name} ...")
    with serving(*servable, host=HOST, port=free_port(), dtype=dtype, device=device) as served:
        if browser:
            show_page(servable, served, host, port)
            return
        exit_code = chat_in_process(servable.name, served, flags or [], system_prompt)
    raise typer.Exit(exit_code)


def chat_in_process(model: str, url: str, flags: list[str], system_prompt: str | None) -> int:
    """Run `transformers chat`, in a separate process: with HF_HUB_OFFLINE, it refuses local connections, too."""
    environment = dict(os.environ)
    environment.pop("HF_HUB_OFFLINE", None)
    # Ctrl-C goes to the chat process, which then exits.
    signal.signal(signal.SIGINT, lambda number, frame: None)
    command = [sys.executable, "-m", "transformers.cli.transformers", "chat", model, url, *flags]
    if system_prompt is not None:
        command += ["--system-prompt", system_prompt]
    return subprocess.run(command, env=environment).returncode


def show_page(model: Servable, url: str, host: str, port: int) -> None:
    received = ReceivedSignals()
    page = build_page(model, url)
    from gradio.themes import Default  # after build_page, which switches Gradio's telemetry off

    theme = Default(font="sans-serif", font_mono="monospace")  # no fonts from Google
    options = {"prevent_thread_lock": True, "quiet": True, "ssr_mode": False, "theme": theme}
    with received.noted():
        page.launch(server_name=host, server_port=port, **options)
        typer.echo(f"Ready: http://{host}:{port}. Ctrl-C stops it.")
        wait_for_signal(received)
    page.close(verbose=False)
    typer.echo("Stopped.")


def build_page(model: Servable, url: str) -> Any:
    """Build Gradio's chat page; without a chat template, a page for text completion."""
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # read when a page is made
    import gradio
    from openai import OpenAI

    options: dict[str, Any] = {"title": model.name, "api_name": "chat"}
    if model.has_chat_template:
        return gradio.load_chat(f"{url}/v1", model.name, "none", file_types=None, **options)
    client = OpenAI(base_url=f"{url}/v1", api_key="none")

    def continued(text: str, history: list[Any]) -> Iterator[str]:
        completion = client.completions.create(
            model=model.name, prompt=text, max_tokens=MAX_TOKENS, stream=True
        )
        for part in completion:
            text += part.choices[0].text
            yield text

    about = "This model lacks a chat template: it continues your text."
    return gradio.ChatInterface(continued, description=about, **options)


def check_servable(model: str, module: str | None = None) -> Servable:
    """Check each file of a folder (of a finished run, its exported model), or that the Hub cache has the id.

    Args:
        module: `package.module` that registers the model's family; by default that of the run's recipe.
    """
    from transformers import AutoTokenizer
    from transformers.utils.import_utils import is_serve_available

    from cpt.models.config import read_config

    if not is_serve_available():
        raise ResourceError(
            f"serving needs fastapi, uvicorn and openai. Install them: {install_line('serving')}"
        )
    folder = Path(model).expanduser()
    if folder.is_dir():
        name = str(check_folder(folder, module))
    else:
        name = model
        if folder.exists():
            raise CheckpointError(f"{model} is a file. Use the folder of an exported model.")
        try:
            validate_repo_id(model)
            read_config(Model(path=model))
        except HFValidationError as problem:
            raise CheckpointError(
                f"{model} is neither a folder (in {Path.cwd()}) nor a Hub id."
            ) from problem
        except (RecipeError, ResourceError) as problem:
            raise type(problem)(str(problem).replace("model.path: ", "")) from problem
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:  # damaged files
        reason = " ".join(str(problem).split())[:300]
        raise CheckpointError(
            f"{name}: cannot load its tokenizer: {reason} Copy its files again."
        ) from problem
    return Servable(name, tokenizer.chat_template is not None)


def check_folder(folder: Path, module: str | None = None) -> Path:
    """Return the folder to serve: this one, or a finished run's model."""
    from cpt.checkpoints.model_folder import Tensors, config_json, kind_of
    from cpt.export.trained import TOKENIZER_FILES
    from cpt.models.families import FAMILIES

    if (folder / RECIPE).is_file() and kind_of(folder) == "nothing":
        if not Run(folder).is_finished:
            raise CheckpointError(
                f"{folder} is a run without a finished model. Export a checkpoint: cpt export {folder} --output FOLDER"
            )
        folder = folder / EXPORT
    if "@" in str(folder) or str(folder).endswith(".gguf"):
        raise CheckpointError(f"{folder}: the server reads `@` as a revision. Rename the folder.")
    kind = kind_of(folder)
    if kind == "adapter":
        raise CheckpointError(
            f"{folder} is a LoRA adapter. Merge it into its base first: cpt export {folder} --output FOLDER"
        )
    has_tokenizer = any((folder / name).is_file() for name in TOKENIZER_FILES)
    if kind != "model" or not (folder / "config.json").is_file() or not has_tokenizer:
        raise CheckpointError(
            f"{folder} is not a complete model with weights, config.json and a tokenizer."
            " Copy the missing files, or: cpt export RUN --output FOLDER"
        )
    Tensors(folder)  # opens each file, to detect missing or truncated ones
    model_type = config_json(folder).get("model_type")
    if model_type in FAMILIES:
        raise CheckpointError(
            f"{folder} is a `{model_type}`, which only cpt loads. Export it: cpt export {folder} --output FOLDER"
        )
    check_architecture(folder, module)
    return folder


def check_architecture(folder: Path, module: str | None = None) -> None:
    """Hugging Face's server only accepts the class that config.json names."""
    import transformers

    from cpt.checkpoints.model_folder import config_json
    from cpt.export.proof import brings_its_code
    from cpt.export.trained import NAME_IT, import_own_code

    config = config_json(folder)
    architecture = (config.get("architectures") or ["(none named)"])[0]
    model_type = config.get("model_type", "")
    if module is not None or not can_be_served(architecture, model_type):
        import_own_code(folder, module)
    if not can_be_served(architecture, model_type):
        remedy = "Export it with cpt export, or update transformers."
        if brings_its_code(folder):
            remedy = NAME_IT
        raise CheckpointError(
            f"{folder}: config.json names {architecture}, not a causal language model of transformers"
            f" {transformers.__version__}. {remedy}"
        )


def can_be_served(architecture: str, model_type: str) -> bool:
    """Whether the server will find the class: in transformers, or registered with AutoModelForCausalLM. The server of
    transformers 5.23 uses `getattr(transformers, architecture)`, so a registered class is set there."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if architecture in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        return True
    if model_type not in CONFIG_MAPPING:
        return False
    registered: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(CONFIG_MAPPING[model_type], None)
    if registered is None or registered.__name__ != architecture:
        return False
    # `transformers` replaces itself in sys.modules while it is imported; the server reads the new module.
    setattr(sys.modules["transformers"], architecture, registered)
    return True


def check_port(host: str, port: int) -> None:
    """Refuse a port in use before loading a model for minutes."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, port), family=family).close()
    except OSError as problem:
        raise LaunchError(
            f"cannot use {host}:{port}: {problem.strerror}. Try another --host or --port."
        ) from problem
