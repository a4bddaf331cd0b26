"""`cpt export --push-to-hub`: report what will be visible, then upload the proven folder."""

from collections.abc import Iterator
from pathlib import Path

import typer

from cpt.checkpoints.model_card import HUB_ID, LICENCE_NOT_KNOWN
from cpt.data.readers.hub import broken
from cpt.errors import RecipeError, ResourceError
from cpt.exporting.sealed import CARD

TOKENS = "https://huggingface.co/settings/tokens"


def check_push(name: str, *, private: bool, sure: bool) -> None:
    """What can be said before anything is written; whether the Hub takes it is asked, too.

    Raises:
        RecipeError: the name is none, or nobody can be asked whether the world may see it.
        ResourceError: no network, no token, or one that may not write.
    """
    if not HUB_ID.fullmatch(name):
        raise RecipeError(f"--push-to-hub {name} is no name on the Hub. Write it as OWNER/NAME.")
    if not private and not sure and not typer.get_text_stream("stdin").isatty():
        raise RecipeError(
            "--push-to-hub makes the model public, and nobody is there to be asked. Add --yes, or --private."
        )
    from huggingface_hub import HfApi, constants, get_token

    if constants.HF_HUB_OFFLINE:
        raise ResourceError(
            "--push-to-hub needs the network, and HF_HUB_OFFLINE is set. Unset it, and run the command again."
        )
    if get_token() is None:
        raise ResourceError(
            f"--push-to-hub needs a token that may write. Make one at {TOKENS}, then: hf auth login, or set HF_TOKEN."
        )
    try:
        who = HfApi().whoami()
    except broken() as problem:
        raise what_went_wrong(problem, name) from problem
    own = [who["name"], *(one["name"] for one in who.get("orgs", []))]
    owner = name.partition("/")[0]
    if owner not in own:
        raise ResourceError(
            f"the token is {who['name']}'s, who may not write to {owner}. Yours are: {', '.join(own)}."
        )


def push(folder: Path, name: str, *, private: bool, sure: bool) -> Iterator[str]:
    """Upload a proven export; interrupted, the same again sends only what the Hub has not.

    Raises:
        ResourceError: the Hub refuses, or cannot be reached.
    """
    from huggingface_hub import HfApi

    told = list(what_will_be_seen(folder, name, private=private))
    if private or sure:
        yield from told
    else:
        for line in told:
            typer.echo(line)
        typer.confirm("Publish it?", abort=True)
    api = HfApi()
    failures: tuple[type[Exception], ...] = (
        RuntimeError,
        *broken(),
    )  # a RuntimeError wraps what happened to one large file
    try:
        url = api.create_repo(name, private=private, exist_ok=True)
        is_private = api.model_info(name).private
        if private and not is_private:
            raise RecipeError(
                f"{name} exists and is public. Make it private in its settings, or push under another name."
            )
        commit = api.upload_folder(
            repo_id=name, folder_path=folder, commit_message=f"{folder.name}, exported and proven by cpt"
        )
    except failures as problem:
        raise what_went_wrong(problem.__cause__ or problem, name, folder) from problem
    yield f"Pushed {folder} to {url}, commit {commit.oid[:12]}."


def what_will_be_seen(folder: Path, name: str, *, private: bool) -> Iterator[str]:
    """Who will see what, under whose licences."""
    files = [file for file in folder.rglob("*") if file.is_file()]
    size = sum(file.stat().st_size for file in files) / 1e6
    seen = "its owner alone" if private else "EVERYBODY"
    yield (
        f"To {name}, to be seen by {seen}: {len(files)} files, {size:,.1f} MB; README.md tells recipe, data and"
        " figures."
    )
    card = (folder / CARD).read_text(encoding="utf-8")
    base = next((line for line in card.splitlines() if "Licence of the base:" in line), None)
    if base is not None:
        yield f"Licence of the base: {base.partition('Licence of the base:')[2].strip()}"
    rows = [[cell.strip() for cell in line.split("|")[1:3]] for line in card.splitlines() if line.startswith("| ")]
    sources = [row for row in data_rows(rows) if row]
    for source, licence in sources:
        yield f"Data: {source}, licence {licence}."
    unstated = base is None or LICENCE_NOT_KNOWN in base or any(licence == LICENCE_NOT_KNOWN for _, licence in sources)
    if unstated and not private:
        yield (
            "warning: not every licence is stated here. Make sure that you may publish it (data.sources[].licence, the"
            " base's own card)."
        )


def data_rows(rows: list[list[str]]) -> Iterator[list[str]]:
    """Of the card's table of sources: below its heading, up to the next table's."""
    inside = False
    for row in rows:
        if row == ["source", "licence"]:
            inside = True
        elif row[0].startswith("held-out"):
            return
        elif inside and not row[0].startswith("---"):
            yield row


def again(folder: Path, name: str) -> str:
    """The command that goes on."""
    return f"cpt export {folder} --push-to-hub {name}"


def what_went_wrong(problem: BaseException, name: str, folder: Path | None = None) -> ResourceError:
    """The Hub's answer with its remedy."""
    kept = (
        ""
        if folder is None
        else f" The export is in {folder}; what the Hub has already is not sent again: {again(folder, name)}"
    )
    response = vars(problem).get("response")  # of huggingface_hub's errors, and of those of httpx that it lets through
    status = None if response is None else response.status_code
    if status == 401:
        return ResourceError(
            f"the Hub does not know the token. Make one that may write at {TOKENS}, then: hf auth login.{kept}"
        )
    if status == 403:
        return ResourceError(
            f"the token may not write to {name}. Make one that may at {TOKENS}, then: hf auth login.{kept}"
        )
    reason = str(problem).strip().splitlines() or [type(problem).__name__]
    return ResourceError(f"the Hub cannot be reached, or does not take it: {reason[0][:200]}.{kept}")
