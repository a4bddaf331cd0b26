"""What `cpt serve` and `cpt chat` refuse before a model is loaded."""

import json
import shutil
import socket
from pathlib import Path

import pytest
import transformers
from tiny_checkpoints import save_adapter
from typer.testing import CliRunner

from cpt.cli import application
from cpt.contrib.serving.serve import check_architecture, check_port, check_servable
from cpt.errors import CheckpointError, LaunchError, ResourceError

CONFIG = {
    "model_type": "lstm_lm",
    "architectures": ["LstmForCausalLM"],
    "auto_map": {"AutoConfig": "lstm_language_model.LstmConfig"},
}


@pytest.fixture
def copied(chat_folder, tmp_path):
    return shutil.copytree(chat_folder, tmp_path / "model")


def test_of_a_finished_run_the_exported_model_is_served(chat_folder, tmp_path):
    shutil.copytree(chat_folder, tmp_path / "final")
    (tmp_path / "recipe.yaml").touch()
    with pytest.raises(CheckpointError, match="cpt export"):
        check_servable(str(tmp_path))
    (tmp_path / "status.json").write_text('{"state": "finished"}')
    assert check_servable(str(tmp_path)).name == str(tmp_path / "final")


def test_an_adapter_is_refused_with_the_command_that_merges_it(chat_folder, tmp_path):
    with pytest.raises(CheckpointError, match="LoRA.*cpt export"):
        check_servable(str(save_adapter(tmp_path / "adapter", chat_folder)))


@pytest.mark.parametrize("file", ["model.safetensors", "tokenizer*"])
def test_an_incomplete_folder_is_refused(copied, file):
    for path in copied.glob(file):
        path.unlink()
    with pytest.raises(CheckpointError, match=str(copied)):
        check_servable(str(copied))


@pytest.mark.parametrize(
    "changes", [{"model_type": "minimind2"}, {"architectures": ["MyOwnModel"]}]
)
def test_a_model_that_transformers_does_not_know_is_refused(copied, changes):
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(CheckpointError, match="cpt export"):
        check_servable(str(copied))


def test_a_folder_name_that_the_server_would_misread_is_refused(copied):
    with pytest.raises(CheckpointError, match="model@home"):
        check_servable(str(copied.rename(copied.with_name("model@home"))))


@pytest.mark.parametrize(
    ("name", "error"), [("/no/such/folder", CheckpointError), ("someone/model", ResourceError)]
)
def test_a_model_that_does_not_exist_is_refused(name, error):
    with pytest.raises(error, match=name):
        check_servable(name)


def test_a_port_in_use_and_a_foreign_address_are_refused():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(LaunchError, match=f":{port}"):
            check_port("127.0.0.1", port)
    check_port("127.0.0.1", port)
    with pytest.raises(LaunchError, match=r"192\.0\.2\.1"):
        check_port("192.0.2.1", 8000)


@pytest.mark.parametrize("how", ["option", "recipe of the run"])
def test_a_class_of_the_users_own_is_where_the_server_looks(tmp_path, how, monkeypatch):
    monkeypatch.delattr(transformers, "LstmForCausalLM", raising=False)
    model = tmp_path / "final"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    if how == "option":
        check_architecture(model, "examples.lstm.lstm_language_model")
    else:
        (tmp_path / "recipe.yaml").write_text(Path("examples/lstm/pretrain.yaml").read_text())
        check_architecture(model)
    assert transformers.LstmForCausalLM.__name__ == "LstmForCausalLM"


# --- cpt chat --------------------------------------------------------------------------------------------------------


def refusal_of_chat(*words):
    return CliRunner().invoke(application(), ["chat", *map(str, words)]).exception


@pytest.mark.parametrize(
    "words", ["nonsense", "--port 9000", "--browser temperature=0", "--browser --system-prompt x"]
)
def test_options_of_the_terminal_and_of_the_page_are_kept_apart(chat_folder, words):
    assert isinstance(refusal_of_chat(chat_folder, *words.split()), LaunchError)


def test_the_terminal_refuses_a_model_without_a_chat_template(plain_folder):
    problem = refusal_of_chat(plain_folder)
    assert isinstance(problem, CheckpointError) and "--browser" in str(problem)
