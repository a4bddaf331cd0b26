"""`cpt chat`: the terminal and the page."""

import pytest
from gradio_client import Client
from typer.testing import CliRunner

from cpt.cli import application
from cpt.errors import CheckpointError, LaunchError
from cpt.process import free_port
from cpt.serving.serve import build_page, check_servable, serving


def refusal(*words):
    return CliRunner().invoke(application("chat"), ["chat", *map(str, words)]).exception


def test_options_of_the_other_place_are_refused(chat_folder):
    for words in (
        ["nonsense"],
        ["--port", "9000"],
        ["--browser", "temperature=0"],
        ["--browser", "--system-prompt", "x"],
    ):
        assert isinstance(refusal(chat_folder, *words), LaunchError)


def test_the_terminal_refuses_a_model_without_a_chat_template(plain_folder):
    problem = refusal(plain_folder)
    assert isinstance(problem, CheckpointError) and "--browser" in str(problem)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["chat_folder", "plain_folder"])
def test_the_page_answers_with_the_served_model(kind, request):
    model, ports = check_servable(str(request.getfixturevalue(kind))), (free_port(), free_port())
    with serving(
        model.name, model.has_chat_template, host="127.0.0.1", port=ports[0], dtype="auto", device="cpu"
    ) as url:
        page = build_page(model, url)
        page.launch(server_port=ports[1], prevent_thread_lock=True, quiet=True, ssr_mode=False)
        try:
            answer = Client(f"http://127.0.0.1:{ports[1]}", verbose=False).predict("the model reads", api_name="/chat")
        finally:
            page.close(verbose=False)
    assert answer and (kind == "chat_folder" or answer.startswith("the model reads"))
