"""`cpt export --push-to-hub`; huggingface_hub's own uploads are not tested again here."""

from unittest.mock import create_autospec

import httpx
import pytest
from huggingface_hub import HfApi, constants
from huggingface_hub.errors import HfHubHTTPError

from cpt.errors import RecipeError, ResourceError
from cpt.export import write
from cpt.export.write import check_push, push

CARD = """# chemist

Licence of the base: apache-2.0.

## Data

| source | licence | share of the training tokens | documents | tokens |
| --- | --- | --- | --- | --- |
| papers | CC-BY-4.0 | 70.0% | 10 | 1,000 |
| letters | not stated | 30.0% | 5 | 400 |

| held-out set | before | after |
"""


def answer_of(status):
    return HfHubHTTPError(
        "refused", response=httpx.Response(status, request=httpx.Request("GET", "https://hub"))
    )


@pytest.fixture
def hub(monkeypatch):
    """In place of HfApi, with its signatures."""
    hub = create_autospec(HfApi, instance=True)
    hub.whoami.return_value = {"name": "chemist", "orgs": [{"name": "lab"}]}
    hub.upload_folder.return_value.oid = "0" * 40
    hub.create_repo.return_value = "https://hub/chemist"
    monkeypatch.setattr(write, "HfApi", lambda: hub)
    monkeypatch.setattr(write, "get_token", lambda: "hf_token")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    return hub


@pytest.fixture
def export(tmp_path):
    (tmp_path / "adapter").mkdir()
    for folder, size in ((tmp_path, 2_500_000), (tmp_path / "adapter", 100_000)):
        (folder / "model.safetensors").write_bytes(b"0" * size)
    (tmp_path / "README.md").write_text(CARD)
    return tmp_path


def test_a_public_push_reports_who_sees_it_and_which_licences_are_not_stated(hub, export):
    report = list(push(export, "chemist/model", private=False, sure=True))
    hub.create_repo.assert_called_once_with("chemist/model", private=False, exist_ok=True)
    hub.upload_folder.assert_called_once_with(
        repo_id="chemist/model",
        folder_path=export,
        commit_message=f"{export.name}, verified by cpt",
    )
    table = CARD.partition("## Data\n\n")[2].partition("\n\n")[0]
    assert report == [
        "Upload to chemist/model, visible to EVERYBODY: 3 files, 2.6 MB; see README.md.",
        "Licence of the base: apache-2.0.",
        f"Data:\n{table}",
        "warning: some licences are not stated. Make sure that you may publish the model"
        " (data.sources[].licence, the base's own card).",
        f"Pushed {export} to https://hub/chemist, commit 000000000000.",
    ]


@pytest.mark.parametrize(
    ("old", "new", "is_warned"),
    [
        ("not stated", "MIT", False),
        ("apache-2.0", "not stated here", True),
        ("Licence of the base: apache-2.0.", "", True),
    ],
)
def test_a_public_push_warns_of_the_licences_that_are_not_stated(hub, export, old, new, is_warned):
    card = CARD if old == "not stated" else CARD.replace("not stated", "MIT")
    (export / "README.md").write_text(card.replace(old, new))
    report = list(push(export, "chemist/model", private=False, sure=True))
    assert any(line.startswith("warning") for line in report) is is_warned
    assert any(line.startswith("Licence of") for line in report) is bool(new)


def test_a_public_push_is_confirmed_unless_the_user_is_sure(hub, export, monkeypatch):
    asked = []
    monkeypatch.setattr("typer.confirm", lambda question, abort: asked.append((question, abort)))
    for private, sure in ((True, False), (True, True), (False, True)):
        hub.model_info.return_value.private = True
        list(push(export, "chemist/model", private=private, sure=sure))
    assert asked == []
    list(push(export, "chemist/model", private=False, sure=False))
    assert asked == [("Publish it?", True)]


def test_a_private_push_never_goes_to_a_public_repository(hub, export):
    report = list(push(export, "chemist/model", private=True, sure=False))
    assert "visible to its owner only: " in report[0]
    assert hub.create_repo.call_args.kwargs["private"] is True and not any(
        "warning" in line for line in report
    )
    hub.model_info.return_value.private = False
    with pytest.raises(RecipeError, match="chemist/open"):
        list(push(export, "chemist/open", private=True, sure=False))
    assert hub.upload_folder.call_count == 1


def test_an_interrupted_push_names_the_command_that_continues_it(hub, export):
    problem = RuntimeError("Error while uploading 'model.safetensors'")
    problem.__cause__ = answer_of(500)
    hub.upload_folder.side_effect = problem
    with pytest.raises(ResourceError, match=f"cpt export {export} --push-to-hub chemist/model"):
        list(push(export, "chemist/model", private=False, sure=True))


@pytest.mark.parametrize(
    ("status", "reason"), [(401, "token is invalid"), (403, "may not write to chemist")]
)
def test_a_token_that_the_hub_refuses_is_an_error_before_anything_is_sent(
    hub, export, status, reason
):
    hub.whoami.side_effect = hub.create_repo.side_effect = answer_of(status)
    with pytest.raises(ResourceError, match=reason):
        check_push("chemist/model", private=False, sure=True)
    with pytest.raises(ResourceError, match=reason):
        list(push(export, "chemist/model", private=False, sure=True))
    hub.upload_folder.assert_not_called()


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (answer_of(500), "or rejects the upload: refused. The export is in"),
        (RuntimeError("first\nsecond"), "or rejects the upload: first. The export is in"),
        (RuntimeError(), "or rejects the upload: RuntimeError. The export is in"),
        (RuntimeError("x" * 300), f"or rejects the upload: {'x' * 200}. The export is in"),
    ],
)
def test_what_went_wrong_is_reported_in_one_line(hub, export, problem, reason):
    hub.upload_folder.side_effect = problem
    with pytest.raises(ResourceError, match=reason):
        list(push(export, "chemist/model", private=False, sure=True))


def test_a_name_of_the_token_or_of_its_organizations_is_accepted(hub, monkeypatch):
    for name in ("chemist/model", "lab/model"):
        check_push(name, private=True, sure=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ResourceError, match="HF_HUB_OFFLINE"):
        check_push("lab/model", private=True, sure=False)


def test_no_token_and_a_strangers_name_are_refused(hub, monkeypatch):
    with pytest.raises(ResourceError, match="stranger.*chemist, lab"):
        check_push("stranger/model", private=False, sure=True)
    monkeypatch.setattr(write, "get_token", lambda: None)
    with pytest.raises(ResourceError, match="needs a token"):
        check_push("chemist/model", private=False, sure=True)


@pytest.mark.parametrize(
    ("name", "named"), [("chemist", "--push-to-hub chemist"), ("chemist/model", "--yes")]
)
def test_nothing_is_published_by_accident(monkeypatch, name, named):
    monkeypatch.setattr("sys.stdin", open("/dev/null"))  # noqa: SIM115
    with pytest.raises(RecipeError, match=named):
        check_push(name, private=False, sure=False)
