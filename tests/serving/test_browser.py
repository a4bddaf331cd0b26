"""What the page begins with, and that its command ends in order; what it shows: test_page.py, and in Chromium
test_in_browser.py."""

import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from run_folders import write_run

from cpt.serving.browser import is_chat, run_of
from cpt.serving.chat import free_port
from cpt.serving.sides import load_sides


def test_a_run_on_documents_begins_with_texts_and_one_on_chats_with_chats(chat_folder, plain_folder, tmp_path):
    (chat,), (text,) = load_sides(str(chat_folder)), load_sides(str(plain_folder))
    assert is_chat([chat], None) and not is_chat([text, chat], None)
    for stage, begins_so in {"cpt": False, "sft": True}.items():
        changes = {"stage": stage, "training": {"per_device_train_batch_size": 4}}
        run = write_run(tmp_path / stage, lambda recipe, changes=changes, **_: recipe.update(changes))
        assert is_chat([chat], run) is begins_so


def test_a_model_that_no_run_made_belongs_to_none(plain_folder):
    assert run_of(str(plain_folder)) is None


@pytest.mark.slow
def test_the_command_serves_the_page_and_ends_in_order_at_ctrl_c(plain_folder):
    port = free_port()
    words = [
        str(Path(sys.executable).parent / "cpt"),
        "chat",
        str(plain_folder),
        "--browser",
        "--port",
        str(port),
        "temperature=0",
    ]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ)
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == f"Loading {plain_folder} ...\n"
        assert process.stdout.readline() == f"Ready: http://127.0.0.1:{port} (model). Ctrl-C stops it.\n"
        assert urllib.request.urlopen(f"http://127.0.0.1:{port}").status == 200
        process.send_signal(signal.SIGINT)
        rest, complaints = process.communicate(timeout=60)
    assert process.returncode == 0 and rest == "Stopped.\n" and "Traceback" not in complaints
