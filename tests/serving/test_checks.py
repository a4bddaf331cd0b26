import json
import shutil
import socket

import pytest
from tiny_checkpoints import save_adapter

from cpt.errors import CheckpointError, LaunchError, ResourceError
from cpt.serving.checks import check_port, check_servable


@pytest.fixture
def copied(chat_folder, tmp_path):
    return shutil.copytree(chat_folder, tmp_path / "model")


def test_a_model_is_known_with_or_without_a_chat_template(chat_folder, plain_folder):
    assert (
        check_servable(str(chat_folder)).has_chat_template and not check_servable(str(plain_folder)).has_chat_template
    )


def test_of_a_finished_run_the_exported_model_is_served(chat_folder, tmp_path):
    shutil.copytree(chat_folder, tmp_path / "final")
    (tmp_path / "recipe.yaml").touch()
    with pytest.raises(CheckpointError, match="without a finished model.*cpt export"):
        check_servable(str(tmp_path))
    (tmp_path / "status.json").write_text('{"state": "finished"}')
    assert check_servable(str(tmp_path)).name == str(tmp_path / "final")


def test_an_adapter_is_refused_with_the_command_that_merges_it(chat_folder, tmp_path):
    adapter = save_adapter(tmp_path / "adapter", chat_folder)
    with pytest.raises(CheckpointError, match="is a LoRA adapter.*cpt export"):
        check_servable(str(adapter))


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("model.safetensors", "is no model that can be served"),
        ("config.json", "is no model"),
        ("tokenizer*", "has no tokenizer"),
    ],
)
def test_an_incomplete_folder_is_refused(copied, file, message):
    for path in copied.glob(file):
        path.unlink()
    with pytest.raises(CheckpointError, match=message):
        check_servable(str(copied))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "minimind2"}, "which only cpt reads.*cpt export"),
        ({"architectures": ["MyOwnModel"]}, "names MyOwnModel, no causal language model"),
        ({"architectures": None}, "names .none named."),
    ],
)
def test_what_the_server_could_not_load_is_refused(copied, changes, message):
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(CheckpointError, match=message):
        check_servable(str(copied))


def test_a_folder_name_that_the_server_would_misread_is_refused(chat_folder, tmp_path):
    with pytest.raises(CheckpointError, match="beginning of a revision"):
        check_servable(str(shutil.copytree(chat_folder, tmp_path / "model@home")))


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("/no/such/folder", CheckpointError, "no folder"),
        ("someone/model", ResourceError, "^someone/model is neither a folder here"),
    ],
)
def test_a_model_that_is_nowhere_is_refused(name, error, message):
    with pytest.raises(error, match=message):
        check_servable(name)


def test_a_port_in_use_is_refused_with_another():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(
            LaunchError, match=f"127.0.0.1:{port}: Address already in use. Choose another: --port {port % 65535 + 1}"
        ):
            check_port("127.0.0.1", port)
    check_port("127.0.0.1", port)


def test_an_address_of_another_machine_is_refused():
    with pytest.raises(LaunchError, match="cannot listen on 192.0.2.1"):
        check_port("192.0.2.1", 8000)
