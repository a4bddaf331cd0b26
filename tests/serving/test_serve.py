import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from openai import OpenAI

from cpt.serving.chat import free_port
from cpt.serving.checks import Servable
from cpt.serving.serve import ready_lines


def test_the_ready_line_gives_a_request_that_fits_the_model():
    chat, plain = (ready_lines(Servable("m", has), "http://localhost:8000") for has in (True, False))
    assert "/v1/chat/completions" in chat and '"messages"' in chat
    assert "/v1/completions" in plain and "no chat template" in plain and '"prompt"' in plain


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)])
def test_the_command_serves_until_it_is_stopped_and_its_own_curl_line_works(plain_folder, number):
    words = [
        str(Path(sys.executable).parent / "cpt"),
        "serve",
        str(plain_folder),
        "--port",
        str(free_port()),
        "--host",
        "127.0.0.1",
    ]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    ) as server:
        for line in server.stdout:
            if line.startswith("Ready: "):
                break
        url = line.split()[1]
        assert "completions only" in line
        answered = subprocess.run(server.stdout.readline().strip(), shell=True, capture_output=True, text=True)
        assert '"text_completion"' in answered.stdout, answered.stderr
        client = OpenAI(base_url=url, api_key="none", max_retries=0)
        assert client.completions.create(model=str(plain_folder), prompt="the model", max_tokens=3).choices[0].text
        server.send_signal(number)
        assert server.stdout.read().rstrip().endswith("Stopped.") and server.wait(timeout=30) == 0
