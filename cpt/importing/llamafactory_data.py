"""The datasets of a LLaMA-Factory config as sources: names in `dataset_info.json`, whose columns and tags say what a
row is."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cpt.errors import RecipeError
from cpt.extend import did_you_mean
from cpt.importing.ledger import Ledger
from cpt.importing.sources import is_on_the_hub, with_names, write_shares
from cpt.recipe.yaml_lines import shown_path

INFO = "dataset_info.json"
REMOTE = "REMOTE:"
ALPACA = {"prompt": "instruction", "query": "input", "response": "output"}
TAGS = {"role_tag": "from", "content_tag": "value", "user_tag": "human", "assistant_tag": "gpt"}
OPENAI = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
MEDIA = ("images", "videos", "audios")
OTHER_JOBS = {
    "export_dir": "writes a model: `cpt merge`, `cpt export`",
    "eval_dataset": "judges a model: `cpt evaluate`",
    "infer_backend": "talks to a model: `cpt chat`, `cpt serve`",
    "task": "judges a model: `cpt evaluate --task`",
}
"""Keys of configs that do not train, and what does it here."""
ELSEWHERE = ("ms_hub_url", "om_hub_url", "script_url", "cloud_file_name")


def write_sources(ledger: Ledger, stage: str) -> None:
    """`data.sources`, their weights, and what is held out.

    Raises:
        RecipeError: the config names no dataset, or dataset_info.json is not JSON.
    """
    folder = str(ledger.value("dataset_dir", "data"))
    info, place = read_info(ledger, folder)
    sources = sources_of(ledger, "dataset", folder, info, place, stage)
    if not sources:
        job = next((f". It is a config that {told}" for key, told in OTHER_JOBS.items() if ledger.value(key)), "")
        raise RecipeError(f"{ledger.config.path}: it names no `dataset` to train on{job}")
    write_weights(ledger, sources)
    ledger.put("data.sources", sources)
    write_shares(ledger, sources)
    found = f"read from {place / INFO}" if info is not None else f"there is no {INFO} in it from here"
    ledger.skip_empty(["dataset_dir"])
    ledger.otherwise(
        "dataset_dir", f"in the paths of data.sources; {found}" if folder != "ONLINE" else "names are of the Hub"
    )
    write_held_out(ledger, folder, info, place, stage)


def read_info(ledger: Ledger, folder: str) -> tuple[Mapping[str, Any] | None, Path]:
    """What dataset_info.json says, looked for from here and from the config's folder upwards; and the folder that it
    lies in."""
    for base in (Path(), *list(ledger.config.path.absolute().parents)[:4]):
        place = base / folder
        if (place / INFO).is_file():
            try:
                found = json.loads((place / INFO).read_text(encoding="utf-8"))
            except (OSError, ValueError) as problem:
                raise RecipeError(f"{place / INFO}: cannot be read as JSON: {problem}") from problem
            if not isinstance(found, dict):
                raise RecipeError(f"{place / INFO}: expected an object with a dataset under each name")
            return found, Path(shown_path(place))
    return None, Path(folder)


def names_in(value: object) -> list[str]:
    """Names with commas between them, or a list."""
    words = value if isinstance(value, list) else str(value).split(",")
    return [str(word).strip() for word in words if str(word).strip()]


def sources_of(
    ledger: Ledger, key: str, folder: str, info: Mapping[str, Any] | None, place: Path, stage: str
) -> list[dict[str, Any]]:
    """The sources that a key names."""
    given = ledger.value(key)
    if given is None:
        ledger.skip_empty([key])
        return []
    sources, missing = [], []
    for name in names_in(given):
        entry = {"hf_hub_url": name} if folder == "ONLINE" else (info or {}).get(name)
        if not isinstance(entry, Mapping):
            missing.append(name)
            sources.append({**source_without_info(place, name), "name": name})
            continue
        sources.append(source_of(ledger, name, entry, place, stage))
    if missing:
        why = f"not in {place / INFO}.{did_you_mean(missing[0], info)}" if info is not None else why_no_info(place)
        written = ", ".join(str(value) for value in source_without_info(place, missing[0]).values())
        remedy = f"The recipe says {written}: write where it is, and its columns as `chat` or `text_column`"
        ledger.drop(key, f"{', '.join(missing)}: {why} {remedy}")
    ledger.enter(key, "carried", f"data.sources, from {INFO}" if key == "dataset" else "evaluation.perplexity")
    return with_names(sources, set())


def source_without_info(place: Path, name: str) -> dict[str, Any]:
    """A guess for a dataset whose columns and file are not known here."""
    if str(place).startswith(REMOTE):
        return {"path": str(place).removeprefix(REMOTE), "data_files": [f"{name}.json"]}
    return {"path": str(place / f"{name}.json")}


def why_no_info(place: Path) -> str:
    """Where the file with the datasets' names would be."""
    if str(place).startswith(REMOTE):
        repository = str(place).removeprefix(REMOTE)
        return (
            f"{INFO} lies on the Hub: `hf download {repository} --repo-type dataset --local-dir DIR`, and set"
            " `dataset_dir: DIR`."
        )
    return f"there is no {place / INFO} from here."


def source_of(ledger: Ledger, name: str, entry: Mapping[str, Any], place: Path, stage: str) -> dict[str, Any]:
    """One dataset by its line in dataset_info.json; what of it is not carried over is told with its name."""
    path = entry.get("hf_hub_url") or (str(place / str(entry["file_name"])) if entry.get("file_name") else None)
    if path is None:
        where = next((key for key in ELSEWHERE if entry.get(key)), "")
        tell(
            ledger,
            name,
            where,
            "datasets are read from the Hub of Hugging Face, from files and from URLs: write its `path`",
        )
        path = str(entry.get(where) or name)
    source: dict[str, Any] = {"path": str(path), "name": name}
    if is_on_the_hub(str(path)) or entry.get("hf_hub_url"):
        source |= {key: entry[key] for key in ("subset", "revision") if entry.get(key)}
        source |= {"split": entry["split"]} if entry.get("split") not in (None, "train") else {}
        source |= {"data_files": [f"{entry['folder']}/**"]} if entry.get("folder") else {}
        source |= {"streaming": True} if ledger.is_on("streaming") else {}
    given = entry.get("num_samples")
    if given and not (isinstance(given, int) and given > 0):
        tell(ledger, name, "num_samples", f"expected a number of rows, got {given!r}: all are read")
        given = None
    most = ledger.whole("max_samples") or given
    source |= {"max_documents": most} if most else {}
    return source | form_of(ledger, name, entry, stage)


def tell(ledger: Ledger, name: str, key: str, told: str) -> None:
    """Something of a dataset's line that is not carried over."""
    place = f"{INFO}: {name}.{key}"
    if place not in {entry.key for entry in ledger.entries}:
        ledger.enter_beside(place, told)


def form_of(ledger: Ledger, name: str, entry: Mapping[str, Any], stage: str) -> dict[str, Any]:
    """What a row is, by formatting, columns and tags."""
    given = entry.get("columns")
    columns = {str(key): str(value) for key, value in given.items() if value} if isinstance(given, Mapping) else {}
    for media in MEDIA:
        if media in columns:
            tell(ledger, name, f"columns.{media}", "models of text alone are trained here")
    if stage in ("cpt", "pretrain"):
        column = columns.get("prompt", "text" if not columns else "instruction")
        by_line = {"text_documents": "line"} if str(entry.get("file_name", "")).endswith(".txt") else {}
        return by_line if column == "text" else {"text_column": column}
    if entry.get("formatting", "alpaca") == "alpaca":
        return {"chat": alpaca_chat(columns if isinstance(given, Mapping) else dict(ALPACA), entry, stage)}
    check_tags(ledger, name, entry)
    return {"chat": sharegpt_chat(columns, entry, stage)}


def alpaca_chat(columns: Mapping[str, str], entry: Mapping[str, Any], stage: str) -> dict[str, str]:
    """A question, with the input below it, and its answers."""
    question, query = columns.get("prompt", "instruction"), columns.get("query")
    chat = {"user": f"{{{question}}}\n{{{query}}}" if query else question}
    if stage in ("dpo", "reward", "orpo", "cpo"):
        chat |= {"chosen": columns.get("chosen", "chosen"), "rejected": columns.get("rejected", "rejected")}
    elif stage != "ppo":
        chat["assistant"] = columns.get("response", "output")
    if stage == "kto":
        chat["label"] = columns.get("kto_tag", "kto_tag")
    return chat | {key: columns[key] for key in ("system", "history", "tools") if key in columns}


def sharegpt_chat(columns: Mapping[str, str], entry: Mapping[str, Any], stage: str) -> dict[str, str]:
    """A list of messages, and what was said of its end."""
    messages = columns.get("messages", "conversations")
    if stage in ("dpo", "reward", "orpo", "cpo"):
        chat = {
            "prompt": messages,
            "chosen": columns.get("chosen", "chosen"),
            "rejected": columns.get("rejected", "rejected"),
        }
    elif stage == "kto":
        chat = {"messages": messages, "label": columns.get("kto_tag", "kto_tag")}
    else:
        chat = {"prompt" if stage == "ppo" else "messages": messages}
    return chat | {key: columns[key] for key in ("system", "tools") if key in columns}


def check_tags(ledger: Ledger, name: str, entry: Mapping[str, Any]) -> None:
    """Messages of the two usual forms are read by themselves; of others, say what to do."""
    given = entry.get("tags")
    tags = {key: str(value) for key, value in given.items()} if isinstance(given, Mapping) else {}
    asked = TAGS | {key: value for key, value in tags.items() if key in TAGS}
    if asked not in (TAGS, OPENAI):
        odd = ", ".join(
            f"{key}: {value}" for key, value in tags.items() if value not in (TAGS.get(key), OPENAI.get(key))
        ) or str(tags)
        tell(
            ledger,
            name,
            "tags",
            f"messages are {{role, content}} of user and assistant, or {{from, value}} of human and gpt, not {odd}",
        )


def write_weights(ledger: Ledger, sources: list[dict[str, Any]]) -> None:
    """Probabilities of an interleaved mixture."""
    ledger.skip_empty(["mix_strategy", "interleave_probs"])
    given = ledger.value("interleave_probs")
    words = names_in(given) if given is not None else []
    if len(words) == len(sources):
        try:
            for source, word in zip(sources, words, strict=True):
                source["weight"] = float(word)
            ledger.otherwise(
                "interleave_probs", "data.sources[].weight: shares of tokens, where they are shares of examples there"
            )
        except ValueError:
            ledger.drop("interleave_probs", f"not a number for each dataset: {given}")
    ledger.drop("interleave_probs", f"{len(words)} numbers for {len(sources)} datasets")
    strategy = str(ledger.value("mix_strategy", "concat"))
    told = (
        "in proportion to their sizes" if strategy == "concat" else "by weight; a source that is used up begins anew"
    )
    ledger.otherwise("mix_strategy", f"one mixture: {told}")


def write_held_out(ledger: Ledger, folder: str, info: Mapping[str, Any] | None, place: Path, stage: str) -> None:
    """Datasets of their own, or a share of the sources."""
    held_out = sources_of(ledger, "eval_dataset", folder, info, place, stage)
    if held_out:
        ledger.put("evaluation.perplexity", held_out, "eval_dataset")
    share = ledger.number("val_size") or 0.0
    ledger.skip_empty(["val_size"])
    if 0 < share < 1:
        ledger.put("evaluation.held_out_share", share, "val_size; documents are chosen by the hash of their text")
        ledger.enter("val_size", "carried", "evaluation.held_out_share")
    elif share >= 1:
        ledger.drop("val_size", f"{share:g} documents: give their share of all of them as `evaluation.held_out_share`")
    ledger.enter("val_size", "carried", "nothing is held out there, as here")
    ledger.skip_empty(["max_samples"])
    ledger.enter("max_samples", "carried", "data.sources[].max_documents")
    ledger.otherwise(
        "streaming", "data.sources[].streaming, for datasets on the Hub" if ledger.is_on("streaming") else "off there"
    )
