"""Serve the page of `cpt chat --browser` on this machine, until Ctrl-C; it asks no other machine for anything."""

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import FrameType

import typer

from cpt.checkpoints.own_code import import_own_code
from cpt.data.readers.forms import form_of_stage
from cpt.errors import ResourceError
from cpt.recipe.load import load_recipe
from cpt.runs.folder import RECIPE
from cpt.serving.about_run import beginnings_of, headline_of
from cpt.serving.answering import Answers, Sampling, sampling_of
from cpt.serving.checks import check_port
from cpt.serving.sides import Side, load_sides, place_of


def chat_in_browser(
    model: str,
    against: str | None,
    *,
    alone: bool,
    host: str,
    port: int,
    words: Sequence[str],
    system_prompt: str | None,
    dtype: str,
    device: str,
    module: str | None = None,
) -> None:
    """Load, serve, wait for the signal, end.

    Args:
        module: the user's own `package.module` that registers the model's family; by default that of the run's recipe.

    Raises:
        ResourceError: Gradio is not installed, or the models do not fit.
    """
    sampling = sampling_of(words)
    check_port(host, port)
    if find_spec("gradio") is None:
        raise ResourceError("the page needs gradio. Install it: pip install 'cpt[chat]'")
    import_own_code(Path(model), module)
    run = run_of(model)
    typer.echo(f"Loading {model} ...")
    sides = load_sides(model, against, alone=alone, dtype=dtype, device=device)
    ended = threading.Event()

    def end(number: int, frame: FrameType | None) -> None:
        ended.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    with page_at(sides, run, host=host, port=port, system_prompt=system_prompt, sampling=sampling) as url:
        typer.echo(f"Ready: {url} ({' and '.join(side.title.lower() for side in sides)}). Ctrl-C stops it.")
        ended.wait()
    typer.echo("Stopped.")


def run_of(model: str) -> Path | None:
    """The run that a folder belongs to."""
    found = place_of(model).trained
    return None if found is None else found.run


def is_chat(sides: Sequence[Side], run: Path | None) -> bool:
    """Whether the page begins so: all have a template, and the run did not train on documents, after which a template
    says nothing."""
    on_documents = run is not None and form_of_stage(load_recipe(run / RECIPE).stage) == "document"
    return all(side.has_template for side in sides) and not on_documents


@contextmanager
def page_at(
    sides: Sequence[Side],
    run: Path | None = None,
    *,
    host: str = "127.0.0.1",
    port: int,
    system_prompt: str | None = None,
    sampling: Sampling | None = None,
) -> Iterator[str]:
    """Serve the page while inside; gives its address."""
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # read when a page is made; it would tell its maker of each one
    import gradio

    from cpt.serving.page import FONT, FONT_MONO, STYLE, About, Stops, build_page

    answers, stops = Answers(), Stops()
    about = About(
        title=sides[-1].name if run is None else run.name,
        headline=None if run is None else headline_of(run),
        examples=() if run is None else beginnings_of(run, sides[-1].tokenizer),
        as_chat=is_chat(sides, run),
        system_prompt=system_prompt,
        sampling=sampling or Sampling(),
    )
    page = build_page(sides, about, answers, stops)
    try:
        _, url, _ = page.launch(
            server_name=host,
            server_port=port,
            share=False,
            prevent_thread_lock=True,
            quiet=True,
            show_error=True,
            ssr_mode=False,
            run_history=False,
            footer_links=[],
            enable_monitoring=False,
            max_file_size=1,
            theme=gradio.themes.Default(primary_hue="blue", font=FONT, font_mono=FONT_MONO),
            css=STYLE,
        )
        yield url.rstrip("/")
    finally:
        stops.stop_all()
        answers.close()
        page.close(verbose=False)
