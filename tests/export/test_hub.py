"""Pushed to a Hub on this machine, by the huggingface_hub that pushes to the real one."""

import pytest
from loopback_hub import Client
from model_hub import READ_ONLY, TOKEN, ModelHub

from cpt.errors import RecipeError
from cpt.export.proof import write_seal
from cpt.export.write import check_push

CARD = """# chemist

Licence of the base: apache-2.0.

## Data

| source | licence | share of the training tokens | documents | tokens |
| --- | --- | --- | --- | --- |
| papers | CC-BY-4.0 | 70.0% | 10 | 1,000 |
| letters | not stated | 30.0% | 5 | 400 |

| held-out set | before | after |
| --- | --- | --- |
| domain | 2.0 | 1.5 |
"""


@pytest.fixture(scope="module")
def server():
    hub = ModelHub()
    yield hub
    hub.shutdown()
    hub.server_close()


@pytest.fixture
def hub(server):
    server.forget()
    return server


@pytest.fixture(scope="module")
def client(server, tmp_path_factory):
    # Xet's own protocol of chunks is not imitated here; huggingface_hub falls back to LFS.
    client = Client(server, tmp_path_factory.mktemp("home"), HF_HUB_DISABLE_XET="1")
    yield client
    client.close()


@pytest.fixture
def export(tmp_path):
    folder = tmp_path / "chemist"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 100)
    (folder / "more.safetensors").write_bytes(bytes(range(255, -1, -1)) * 100)
    (folder / "config.json").write_text("{}")
    (folder / "README.md").write_text(CARD)
    write_seal(folder, ["proven"])
    return folder


def pushing(folder, name="chemist/model", *, private=False):
    options = f"private={private}, sure=True"
    return (
        "from pathlib import Path\nfrom cpt.export.write import check_push, push\n"
        f"check_push({name!r}, {options})\nresult = list(push(Path({str(folder)!r}), {name!r}, {options}))"
    )


def test_every_byte_of_an_export_arrives_and_the_report_says_who_sees_it(hub, client, export):
    told = client(pushing(export), HF_TOKEN=TOKEN)
    local = {file.name: file.read_bytes() for file in export.iterdir()}
    assert {name: content for name, content in hub.files("chemist/model").items() if name != ".gitattributes"} == local
    assert "EVERYBODY" in told[0] and any("apache-2.0" in line for line in told)
    assert "CC-BY-4.0" in told[2] and "letters" in told[2] and told[3].startswith("warning")
    assert hub.private == {"chemist/model": False}


def test_an_interrupted_push_continues_with_what_the_hub_lacks(hub, client, export):
    hub.breaking = 1
    with pytest.raises(RuntimeError, match="ResourceError: .*cpt export .*--push-to-hub"):
        client(pushing(export), HF_TOKEN=TOKEN)
    assert hub.files("chemist/model").keys() == {".gitattributes"}
    arrived, sent = len(hub.blobs), hub.uploads()
    client(pushing(export), HF_TOKEN=TOKEN)
    assert hub.uploads() - sent == 2 - arrived and len(hub.files("chemist/model")) == 6


def test_a_private_push_is_private_and_never_lands_in_a_public_repository(hub, client, export):
    told = client(pushing(export, private=True), HF_TOKEN=TOKEN)
    assert hub.private == {"chemist/model": True} and not any("warning" in line for line in told)
    hub.private["chemist/model"] = False
    with pytest.raises(RuntimeError, match="RecipeError: chemist/model"):
        client(pushing(export, private=True), HF_TOKEN=TOKEN)
    assert len(hub.commits["chemist/model"]) == 2


@pytest.mark.parametrize(
    ("token", "name", "message"),
    [
        ("", "chemist/model", "needs a token"),
        ("hf_wrong", "chemist/model", "does not know the token"),
        (READ_ONLY, "chemist/model", "may not write to chemist/model"),
        (TOKEN, "stranger/model", "may not write to stranger"),
    ],
)
def test_a_token_without_the_right_to_write_is_refused_before_anything_is_sent(
    hub, client, export, token, name, message
):
    with pytest.raises(RuntimeError, match=f"ResourceError: .*{message}"):
        client(pushing(export, name), HF_TOKEN=token)
    assert not hub.blobs and not any(hub.commits.values())


@pytest.mark.parametrize(("name", "message"), [("chemist", "--push-to-hub chemist"), ("chemist/model", "--yes")])
def test_nothing_is_published_by_accident(monkeypatch, name, message):
    monkeypatch.setattr("sys.stdin", open("/dev/null"))  # noqa: SIM115
    with pytest.raises(RecipeError, match=message):
        check_push(name, private=False, sure=False)
