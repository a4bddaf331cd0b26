"""Whether the files that a run read are still what they were: data, held-out sets, tokenizer, weights."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from cpt.data.readers.files import hash_file, states_of
from cpt.data.readers.opening import is_url
from cpt.errors import CptError, DataError
from cpt.models.hashes import hash_weights
from cpt.recipe.schema import DocumentSource, Recipe
from cpt.recipe.sense_data import reported_name
from cpt.reproduce.record import Record
from cpt.stages.inputs import hash_of_tokenizer
from cpt.tokenizer.load import load_tokenizer

HASHED_AT_ONCE = 4


def refuse_changed_inputs(record: Record) -> None:
    """Stop where anything is another; relative paths count from the folder that this process is in.

    Raises:
        DataError: naming each file.
    """
    changed = [*changed_data(record.recipe, record.inputs), *changed_tokenizer(record), *changed_weights(record)]
    if changed:
        listing = "\n".join(f"  {line}" for line in changed)
        raise DataError(
            f"{record.folder} cannot be repeated: what it read is not there as it was.\n{listing}\nPut it back, then"
            " again."
        )


def changed_data(recipe: Recipe, inputs: Mapping[str, Any]) -> list[str]:
    """One line for each file that differs, is gone or is new."""
    recorded = inputs.get("data", {})
    training, held_out = recorded.get("sources", {}), recorded.get("held_out", {})
    lines = []
    for number, source in enumerate(recipe.data.sources):
        lines += changed_files(
            source, f"data.sources[{number}]", training.get(reported_name(source), {}).get("files", {})
        )
    for number, judge in enumerate(recipe.evaluation.perplexity):
        lines += changed_files(judge, f"evaluation.perplexity[{number}]", held_out.get(reported_name(judge), {}))
    return lines


def changed_files(source: DocumentSource, key: str, recorded: Mapping[str, str]) -> list[str]:
    """Of one source. Where it moved as a whole its files are known by their names; one that was never read to its end
    has no record."""
    if not recorded:
        return []
    try:
        versions = {name: version for name, _, version in states_of(source, key)}
    except CptError as problem:
        return [f"{key}: {problem}"]
    if not versions:  # a function, or a dataset without files: its rows are compared by the data's fingerprint
        return []
    pairs = paired(list(recorded), list(versions))
    with ThreadPoolExecutor(HASHED_AT_ONCE) as pool:
        hashes = dict(
            zip(
                pairs.values(),
                pool.map(lambda name: version_of(name, versions[name], key), pairs.values()),
                strict=True,
            )
        )
    changed = [
        f"{key}: {now} has changed (xxh3-128 {recorded[then]} then, {hashes[now]} now)"
        for then, now in pairs.items()
        if recorded[then] != hashes[now]
    ]
    gone = [f"{key}: {name} is gone" for name in recorded if name not in pairs]
    new = [f"{key}: {name} was not there" for name in versions if name not in pairs.values()]
    return [*changed, *gone, *new]


def paired(then: Sequence[str], now: Sequence[str]) -> dict[str, str]:
    """Recorded file -> the same file now: by its path, else by its name."""
    pairs = {name: name for name in then if name in now}
    left = [name for name in now if name not in pairs]
    for name in then:
        same = next((other for other in left if Path(other).name == Path(name).name), None)
        if name not in pairs and same is not None:
            pairs[name] = same
            left.remove(same)
    return pairs


def version_of(name: str, version: str, key: str) -> str:
    """The hash of a file; of one behind a URL what its server says, as the record has it."""
    return version if is_url(name) else hash_file(name, key)


def changed_tokenizer(record: Record) -> list[str]:
    """At most one line."""
    recorded = record.inputs.get("tokenizer", {})
    try:
        tokenizer = load_tokenizer(record.recipe.tokenizer, record.recipe.model)
    except CptError as problem:
        return [f"tokenizer: {problem}"]
    return (
        []
        if recorded.get("xxh3") in (None, hash_of_tokenizer(tokenizer))
        else [f"tokenizer: {recorded.get('path')} gives other ids"]
    )


def changed_weights(record: Record) -> list[str]:
    """Of the model that the run began with, and of a teacher."""
    lines = []
    for part in ("weights", "teacher"):
        recorded = record.inputs.get(part, {})
        hashes: Mapping[str, str] = recorded.get("sha256") or {}
        if not hashes:
            continue
        try:
            now = hash_weights(recorded["path"], recorded.get("revision"))
        except CptError as problem:
            lines.append(f"{part}: {problem}")
            continue
        except OSError as problem:
            lines.append(f"{part}: {recorded['path']} cannot be read ({problem.strerror})")
            continue
        differing = [name for name in {**hashes, **now} if hashes.get(name) != now.get(name)]
        lines += [
            f"{part}: {Path(recorded['path']) / name} {'is gone' if name not in now else 'has changed'}"
            for name in differing
        ]
    return lines
