"""Choose the documents of a folder: in a saved dataset or a download from the Hub, only the files of the split."""

import json
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from posixpath import basename, dirname, splitext
from typing import Any

from cpt.data.readers.documents import File
from cpt.errors import DataError
from cpt.recipe.paths import DOCUMENT_FILES, TEXT_FILES, format_of

DICT = "dataset_dict.json"  # written by `save_to_disk`, like the next one
STATE = "state.json"
OF_DATASETS = {DICT, STATE, "dataset_info.json", "dataset_infos.json"}
CARD = "README.md"
ROW_FILES = DOCUMENT_FILES - TEXT_FILES
ABOUT_FILES = "README or LICENSE"
CACHE = re.compile(r"cache-.*\.arrow|tmp[0-9a-z_]{8}")  # written by `map` and `filter`
ABOUT = re.compile(
    r"(readme|licen[cs]e|copying|notice|citation|changelog|contributing|code_of_conduct)[^.]*(\.[^.]*)?",
    re.IGNORECASE,
)
# One of these keys in the front matter of README.md makes it the card of a dataset.
CARD_KEYS = {
    "configs",
    "dataset_info",
    "license",
    "license_name",
    "pretty_name",
    "size_categories",
    "task_categories",
    "task_ids",
    "annotations_creators",
    "source_datasets",
}
# The split rules of `datasets`: sharded files, else names of folders, else names of files.
SEPARATOR = "[-._ 0-9]"
WORDS = {
    "train": "train|training",
    "validation": "validation|valid|dev|val",
    "test": "test|testing|eval|evaluation",
}
SHARDED = re.compile(r"data/(\w+(?:\.\w+)*)-\d{5}-of-\d{5}[^/]*\.[^/]*")
SHARD = re.compile(r"(.*[-_.])(\d{5,})-of-(\d{5,})([^/]*)")
IN_FOLDER = {
    split: re.compile(rf"(?:.*/)?(?:[^/]*{SEPARATOR})?(?:{words})(?:{SEPARATOR}[^/]*)?/.+")
    for split, words in WORDS.items()
}
IN_NAME = {
    split: re.compile(rf"(?:.*/)?(?:[^/]*{SEPARATOR})?(?:{words}){SEPARATOR}[^/]*")
    for split, words in WORDS.items()
}


@dataclass(frozen=True)
class Listing:
    """The files of a source, in order, and those of its folder that are not read."""

    files: list[File] = field(default_factory=list)
    passed_over: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Reason -> (files, bytes), the largest number of files first."""
    missing: list[str] = field(default_factory=list)
    """Shards that the names of others promise."""

    @cached_property
    def formats(self) -> Counter[str]:
        return Counter(format_of(file.name) for file in self.files)

    @property
    def is_mixed(self) -> bool:
        """True for files of several formats; txt and md are one."""
        return len(self.formats) > 1 and not self.formats.keys() <= TEXT_FILES

    def __str__(self) -> str:
        formats = []
        for suffix, count in self.formats.most_common():
            name = suffix.removeprefix(".")
            formats.append(f"{count:,} {name}")
        passed_over = []
        for reason, (files, num_bytes) in self.passed_over.items():
            passed_over.append(f"{files:,} {reason} ({num_bytes:,} bytes)")
        text = ", ".join(formats)
        if passed_over:
            text += f"; passed over: {', '.join(passed_over)}"
        return text


def count_passed_over(reasons: Iterable[tuple[str, int]]) -> dict[str, tuple[int, int]]:
    """Reason -> (files, bytes), of a reason and a size for each file."""
    files = Counter[str]()
    sizes = Counter[str]()
    for reason, size in reasons:
        files[reason] += 1
        sizes[reason] += size
    return {reason: (count, sizes[reason]) for reason, count in files.most_common()}


def missing_shards(names: Iterable[str]) -> list[str]:
    """`train-00002-of-00004.parquet`, if other shards of the four are among the names."""
    numbers: dict[tuple[str, str, str], set[int]] = {}
    for name in names:
        if "-of-" in name and (shard := SHARD.fullmatch(name)) is not None:
            before, number, num_shards, after = shard.groups()
            numbers.setdefault((before, num_shards, after), set()).add(int(number))
    missing = []
    for (before, num_shards, after), present in numbers.items():
        first = 1 if int(num_shards) in present else 0  # some count from 1
        absent = set(range(first, first + int(num_shards))) - present
        for number in sorted(absent):
            digits = str(number).zfill(len(num_shards))
            missing.append(f"{before}{digits}-of-{num_shards}{after}")
    return missing


@dataclass
class Folder:
    """The names in a folder, sorted, with / between their parts, and why each is not a document."""

    path: str
    names: Sequence[str]
    read: Callable[[str], bytes]
    split: str
    subset: str | None
    key: str
    reasons: dict[str, str] = field(default_factory=dict)
    is_split_used: bool = False
    is_subset_used: bool = False

    def below(self, folder: str) -> Sequence[str]:
        if not folder:
            return self.names
        first = bisect_left(self.names, folder)
        end = bisect_left(self.names, folder[:-1] + "0")  # "0" follows "/"
        return self.names[first:end]

    def called(self, name: str) -> list[str]:
        """The files of this name in all folders."""
        below = f"/{name}"
        return [path for path in self.names if path == name or path.endswith(below)]

    def leave_out(self, names: Iterable[str], reason: str) -> None:
        for name in names:
            self.reasons.setdefault(name, reason)

    def no_split(self, folder: str, splits: Iterable[str]) -> DataError:
        has = ", ".join(f"`{split}`" for split in splits) or "none"
        where = f"{self.path.rstrip('/')}/{folder}".rstrip("/")
        another = f", or make {where} a source of its own with it" if folder else ""
        return DataError(
            f"{where}: no split `{self.split}`. It has: {has}. Set `{self.key}.split`{another}."
        )


def reasons_to_pass_over(folder: Folder, is_download: bool = False) -> dict[str, str]:
    """Name -> why it is not a document, for all that are not. `is_download`: the folder is known to be a dataset."""
    for name in folder.names:
        if format_of(name) not in DOCUMENT_FILES:
            suffix = splitext(name)[1]
            folder.reasons[name] = f"{suffix} files" if suffix else "files without a suffix"
    claimed = saved_datasets(folder)
    for name in folder.names:
        reason = why_not_data(name)
        if reason and reason != ABOUT_FILES:  # those may be the text
            folder.leave_out([name], reason)
    roots = dataset_roots(folder)
    if is_download:
        roots.setdefault("", {})
    for root in sorted(roots, key=lambda root: (root.count("/"), root)):
        prefix = f"{root}/" if root else ""
        if not prefix.startswith(tuple(claimed)):
            claimed.append(prefix)
            choose_as_the_hub(folder, prefix, roots[root])
    if "" not in claimed:
        choose_by_names(folder, claimed)
    if folder.split != "train" and not folder.is_split_used:
        raise folder.no_split("", [])
    if folder.subset is not None and not folder.is_subset_used:
        raise DataError(
            f"{folder.path}: no subset `{folder.subset}`. Remove `{folder.key}.subset`."
        )
    return folder.reasons


def dataset_roots(folder: Folder) -> dict[str, dict[str, Any]]:
    """The folders that are datasets of the Hub, each with the front matter of its card."""
    roots: dict[str, dict[str, Any]] = {}
    for name in folder.called(CARD):
        card = card_of(folder, name)
        if card:
            roots[dirname(name)] = card
    for name in folder.called("dataset_infos.json"):
        roots[dirname(name)] = {}
    return roots


def saved_datasets(folder: Folder) -> list[str]:
    """Leave out all but the files of the split in folders that `save_to_disk` wrote; return these folders."""
    claimed = []
    for name in folder.called(DICT):
        prefix = name.removesuffix(DICT)
        splits = values_of(folder, name, "splits")
        if not splits:
            continue
        if folder.split not in splits:
            raise folder.no_split(prefix, splits)
        folder.is_split_used = True
        claimed.append(prefix)
        for split in splits:
            if split != folder.split:
                folder.leave_out(folder.below(f"{prefix}{split}/"), f"of split `{split}`")
        files_of_split = set(folder.below(f"{prefix}{folder.split}/"))
        leave_out_others(folder, set(folder.below(prefix)) - files_of_split, DICT)
    for name in folder.called(STATE):
        prefix = name.removesuffix(STATE)
        stored = [prefix + str(file["filename"]) for file in values_of(folder, name, "_data_files")]
        if not stored or folder.reasons.get(name):
            continue
        claimed.append(prefix)
        missing = sorted(set(stored) - set(folder.below(prefix)))
        if missing:
            raise DataError(
                f"{folder.path}: {missing[0]}, one of the {len(stored)} files of the dataset in {name}, is missing."
                f" Copy the folder again, or set `{folder.key}.path` to a glob of the files that are there."
            )
        leave_out_others(folder, set(folder.below(prefix)) - set(stored), STATE)
    return claimed


def leave_out_others(folder: Folder, names: Iterable[str], described_in: str) -> None:
    for name in names:
        folder.leave_out([name], why_not_data(name) or f"not in the dataset of `{described_in}`")


def why_not_data(name: str) -> str:
    """The reason why a file of a dataset is not read as documents, by its name; empty if it may be."""
    base = basename(name)
    if CACHE.fullmatch(base):
        return "caches of `datasets`"
    if base in OF_DATASETS:
        return "metadata of `datasets`"
    return ABOUT_FILES if is_about(name) else ""


def values_of(folder: Folder, name: str, key: str) -> list[Any]:
    try:
        values = json.loads(folder.read(name))[key]
    except (ValueError, KeyError, TypeError):  # a file of another program
        return []
    return values if isinstance(values, list) else []


def card_of(folder: Folder, name: str) -> dict[str, Any] | None:
    """The front matter of a dataset's card; None for another README."""
    if folder.reasons.get(name):
        return None
    text = folder.read(name).decode(errors="replace").removeprefix("\ufeff")
    front_matter = re.match(r"---\s*\n(.*?)\n---\s*(\n|$)", text, re.DOTALL)
    if front_matter is None:
        return None
    import yaml

    try:
        card = yaml.safe_load(front_matter[1])
    except yaml.YAMLError:
        return None
    return card if isinstance(card, dict) and CARD_KEYS & card.keys() else None


def choose_as_the_hub(folder: Folder, prefix: str, card: Mapping[str, Any]) -> None:
    """Leave out what `datasets` would not read of a folder with this card."""
    config = config_of(folder, prefix, card)
    folder.leave_out(filter(is_about, folder.below(prefix)), ABOUT_FILES)
    names = []
    for name in folder.below(prefix):
        if name not in folder.reasons:
            names.append(name.removeprefix(prefix))
    splits = splits_of_config(names, config)
    folder.is_split_used = True
    files_of_split = splits.get(folder.split)
    if not files_of_split:
        raise folder.no_split(prefix, [split for split, files in splits.items() if files])
    for split, files in splits.items():
        leave_out_but(folder, prefix, files, files_of_split, f"of split `{split}`")
    leave_out_but(folder, prefix, names, files_of_split, "not in the dataset's data files")


def leave_out_but(
    folder: Folder, prefix: str, names: Iterable[str], read: Collection[str], reason: str
) -> None:
    """Leave out the names below a prefix, except those that are read."""
    folder.leave_out((prefix + name for name in names if name not in read), reason)


def config_of(folder: Folder, prefix: str, card: Mapping[str, Any]) -> Mapping[str, Any]:
    """The configuration of the subset, or the default one."""
    listed = card.get("configs") or []
    configs = {}
    for config in listed:
        if isinstance(config, dict):
            name = str(config.get("config_name", "default"))
            configs[name] = config
    if folder.subset is not None and folder.subset in configs:
        folder.is_subset_used = True
        return configs[folder.subset]
    defaults = [config for config in configs.values() if config.get("default")]
    if len(configs) > 1 and "default" not in configs and not defaults:
        raise DataError(
            f"{folder.path}: {prefix}{CARD} has the subsets {', '.join(configs)}. Set `{folder.key}.subset`."
        )
    if defaults:
        return defaults[0]
    return configs.get("default") or next(iter(configs.values()), {})


def splits_of_config(names: Sequence[str], config: Mapping[str, Any]) -> dict[str, list[str]]:
    data_files = config.get("data_files")
    data_dir = str(config.get("data_dir") or "").strip("./")
    base = f"{data_dir}/" if data_dir else ""
    if data_files is None:
        within = [name.removeprefix(base) for name in names if name.startswith(base)]
        splits = splits_by_name(within) or {"train": of_most_common_format(within)}
        return {split: with_prefix(base, files) for split, files in splits.items()}
    patterns = patterns_of(data_files, base)
    return {split: list(filter(pattern.match, names)) for split, pattern in patterns.items()}


def with_prefix(prefix: str, names: Iterable[str]) -> list[str]:
    return [prefix + name for name in names]


def patterns_of(data_files: Any, base: str) -> dict[str, re.Pattern[str]]:
    """`data_files` of a card: a pattern, a list of them, a dict, or a list of `{split: ..., path: ...}`."""
    from fsspec.utils import glob_translate

    if isinstance(data_files, list) and all(isinstance(entry, dict) for entry in data_files):
        data_files = {entry.get("split", "train"): entry.get("path", []) for entry in data_files}
    if not isinstance(data_files, dict):
        data_files = {"train": data_files}
    patterns = {}
    for split, paths in data_files.items():
        if not isinstance(paths, list):
            paths = [paths]
        globs = [glob_translate(base + str(path).removeprefix("./")) for path in paths]
        patterns[str(split)] = re.compile("|".join(globs))
    return patterns


def splits_by_name(names: Sequence[str]) -> dict[str, list[str]]:
    """Split -> names, by the rules of `datasets`; empty if no name has a split's word."""
    sharded: dict[str, list[str]] = {}
    for name in names:
        shard = SHARDED.fullmatch(name)
        if shard is not None:
            sharded.setdefault(shard[1], []).append(name)
    if sharded:
        return sharded
    for rules in (IN_FOLDER, IN_NAME):
        splits = {}
        for split, rule in rules.items():
            files = list(filter(rule.fullmatch, names))
            if files:
                splits[split] = files
        if splits:
            return splits
    return {}


def of_most_common_format(names: Sequence[str]) -> list[str]:
    by_format: dict[str, list[str]] = {}
    for name in names:
        suffix = format_of(name).replace(".jsonl", ".json")
        by_format.setdefault(suffix, []).append(name)
    return max(by_format.values(), key=len, default=[])


def is_about(name: str) -> bool:
    return ABOUT.fullmatch(basename(name)) is not None and format_of(name) in TEXT_FILES


def choose_by_names(folder: Folder, claimed: Sequence[str]) -> None:
    """Apply the split rules to each folder without a card whose files of rows all have names of splits. A README is
    no document if all other files are rows; among code and texts it is."""
    unclaimed = [name for name in folder.names if not name.startswith(tuple(claimed))]
    rest = [name for name in unclaimed if name not in folder.reasons]
    if all(format_of(name) in ROW_FILES or ABOUT.fullmatch(basename(name)) for name in unclaimed):
        rows = [name for name in rest if not is_about(name)]
        if rows:
            folder.leave_out(filter(is_about, rest), ABOUT_FILES)
            rest = rows
    for prefix, names in with_subfolders(rest):
        splits = guessed_splits(names)
        if folder.split not in splits:
            continue
        folder.is_split_used = True
        files_of_split = set(splits[folder.split])
        for split, files in splits.items():
            leave_out_but(folder, prefix, files, files_of_split, f"of split `{split}`")
        folder.leave_out((prefix + name for name in names if is_about(name)), ABOUT_FILES)


def with_subfolders(names: Sequence[str]) -> Iterable[tuple[str, list[str]]]:
    """Each folder with the names below it, from the top; the folders in one with split names are not visited."""
    waiting = [("", list(names))]
    while waiting:
        prefix, below = waiting.pop()
        if not any(format_of(name) not in TEXT_FILES or WORD.search(name) for name in below):
            continue  # a folder of text: its names mean nothing
        yield prefix, below
        if guessed_splits(below):
            continue
        children: dict[str, list[str]] = {}
        for name in below:
            child, slash, rest = name.partition("/")
            if slash:
                children.setdefault(f"{child}/", []).append(rest)
        waiting += [(prefix + child, inside) for child, inside in children.items()]


WORD = re.compile("|".join(WORDS.values()))


def guessed_splits(names: Sequence[str]) -> dict[str, list[str]]:
    """The splits of a folder, if all its files of rows, or else all its txt files, are of one and some of `train`."""
    documents = [name for name in names if format_of(name) not in TEXT_FILES]
    is_text = not documents
    if is_text:
        documents = [name for name in names if not is_about(name)]
        if any(format_of(name) == ".md" for name in documents):
            return {}
    splits = splits_by_name(documents)
    covered = set[str]().union(*splits.values())
    is_sure = len(covered) == len(documents) and "train" in splits
    return splits if is_sure and not (is_text and len(splits) == 1) else {}
