"""`cpt export --push-to-hub`: report what will be visible, then upload the proven folder."""

from collections.abc import Iterator
from pathlib import Path

import typer
from huggingface_hub import HfApi, constants, get_token

from cpt.data.readers.hub import broken
from cpt.errors import RecipeError, ResourceError
from cpt.export.model_card import HUB_ID, UNKNOWN_LICENCE
from cpt.export.proof import CARD

TOKENS = "https://huggingface.co/settings/tokens"


def check_push(name: str, *, private: bool, sure: bool) -> None:
    """RecipeError for a name or answer that is missing, ResourceError for the network, the token or its rights."""
    if not HUB_ID.fullmatch(name):
        raise RecipeError(f"--push-to-hub {name} is no name on the Hub. Write it as OWNER/NAME.")
    if not private and not sure and not typer.get_text_stream("stdin").isatty():
        raise RecipeError("--push-to-hub makes the model public, and nobody can be asked. Add --yes, or --private.")
    if constants.HF_HUB_OFFLINE:
        raise ResourceError("--push-to-hub needs the network, and HF_HUB_OFFLINE is set. Unset it, and try again.")
    if get_token() is None:
        raise ResourceError(f"--push-to-hub needs a token that may write: {TOKENS}. Run: hf auth login")
    try:
        who = HfApi().whoami()
    except broken() as problem:
        raise what_went_wrong(problem, name) from problem
    own = [who["name"], *(one["name"] for one in who.get("orgs", []))]
    owner = name.partition("/")[0]
    if owner not in own:
        raise ResourceError(f"{who['name']}'s token may not write to {owner}. Yours are: {', '.join(own)}.")


def push(folder: Path, name: str, *, private: bool, sure: bool) -> Iterator[str]:
    """Upload a proven export; after an interruption, the same command sends only what the Hub lacks."""
    files = [file for file in folder.rglob("*") if file.is_file()]
    size = sum(file.stat().st_size for file in files) / 1e6
    seen = "its owner alone" if private else "EVERYBODY"
    yield f"To {name}, to be seen by {seen}: {len(files)} files, {size:,.1f} MB; see README.md."
    card = (folder / CARD).read_text(encoding="utf-8")
    base = next((line for line in card.splitlines() if "Licence of the base:" in line), None)
    if base is not None:
        yield f"Licence of the base: {base.partition('Licence of the base:')[2].strip()}"
    data = card.partition("## Data\n")[2].strip().partition("\n\n")[0]
    yield f"Data:\n{data}"
    if not private and (base is None or UNKNOWN_LICENCE in base + data):
        where = "(data.sources[].licence, the base's own card)"
        yield f"warning: not every licence is stated here. Make sure that you may publish it {where}."
    if not (private or sure):
        typer.confirm("Publish it?", abort=True)
    api = HfApi()
    # A RuntimeError wraps what happened to one large file.
    failures: tuple[type[Exception], ...] = (RuntimeError, *broken())
    try:
        url = api.create_repo(name, private=private, exist_ok=True)
        if private and not api.model_info(name).private:
            raise RecipeError(f"{name} exists and is public. Make it private in its settings, or use another name.")
        commit = api.upload_folder(repo_id=name, folder_path=folder, commit_message=f"{folder.name}, proven by cpt")
    except failures as problem:
        raise what_went_wrong(problem.__cause__ or problem, name, folder) from problem
    yield f"Pushed {folder} to {url}, commit {commit.oid[:12]}."


def what_went_wrong(problem: BaseException, name: str, folder: Path | None = None) -> ResourceError:
    response = vars(problem).get("response")  # of huggingface_hub's errors, and of those of httpx that it lets through
    status = 0 if response is None else int(response.status_code)
    lines = str(problem).strip().splitlines() or [type(problem).__name__]
    reason = f"the Hub cannot be reached, or does not take it: {lines[0][:200]}."
    remedy = f"Make one that may write at {TOKENS}, then: hf auth login."
    if status == 401:
        reason = f"the Hub does not know the token. {remedy}"
    if status == 403:
        reason = f"the token may not write to {name}. {remedy}"
    if folder is not None:
        again = f"cpt export {folder} --push-to-hub {name}"
        reason += f" The export is in {folder}; what the Hub has already is not sent again: {again}"
    return ResourceError(reason)
