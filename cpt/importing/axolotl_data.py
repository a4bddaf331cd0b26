"""The datasets of an axolotl config as sources: `datasets`, `pretraining_dataset`, `test_datasets`, `val_set_size`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cpt.errors import RecipeError
from cpt.extend import did_you_mean
from cpt.importing.axolotl_forms import (
    CHAT,
    FRAME_TOLD,
    SHAREGPT,
    TEXT,
    base_of,
    chat_of_own,
    chat_of_pairs,
    chat_of_rl,
)
from cpt.importing.ledger import EMPTY, Ledger
from cpt.importing.sources import is_on_the_hub, places_of, split_of, with_names, write_shares
from cpt.recipe.paths import is_local

STAGES = {"dpo": "dpo", "ipo": "dpo", "kto": "kto", "orpo": "orpo", "simpo": "cpo", "grpo": "grpo", "gdpo": "grpo"}
ROLES_READ = (("role", "content"), ("from", "value"), ("role", "value"))
"""What messages may be made of."""
ROLES = {
    "user": {"user", "human"},
    "assistant": {"assistant", "gpt", "bot"},
    "tool": {"tool", "observation", "function_response"},
}
"""Role -> what it may be called in the files, where that is not its own name alone."""
ASSISTANTS: tuple[list[str], ...] = (["assistant"], ["gpt"], ["assistant", "gpt"], [])
PIECES = "a part of a dataset cannot be named; `max_documents` takes its beginning"
TURNS = "every turn of the assistant is learned, with the token that ends it"
TEMPLATES = "the tokenizer's own template writes every chat; give the tokenizer another one and set `tokenizer.path`"
NOT_OF_A_DATASET = {
    **dict.fromkeys(("shards", "shards_idx"), PIECES),
    **dict.fromkeys(("chat_template", "chat_template_jinja", "conversation", "input_format"), TEMPLATES),
    **dict.fromkeys(("message_field_training", "message_field_training_detail", "train_on_eot"), TURNS),
    "roles": (
        "roles are read as they are, and ShareGPT's human and gpt as user and assistant; rename others in the files"
    ),
    "drop_system_message": "system prompts stay; take them out of the files",
    "split_thinking": "the tokenizer's template decides what becomes of a reasoning trace",
    "field_thinking": "the reasoning of a message must stand in it as its template wants it",
    "template_thinking_key": "the reasoning of a message must stand in it as its template wants it",
    "input_transform": "write a function of your own: `path: package.module:function`",
    **dict.fromkeys(
        ("logprobs_field", "temperature"), "a teacher's probabilities are not read; stage `distill` asks the teacher"
    ),
    "skip": "the beginning of a dataset cannot be left out; name other files",
    **dict.fromkeys(
        ("step_separator", "max_completion_length", "train_on_last_step_only"), "rewards for each step are not learned"
    ),
}
IDLE_IN_A_DATASET = {
    "preprocess_shards": "read in pieces anyway",
    "ds_type": "told by the files' names",
    "trust_remote_code": "no code of a dataset is ever run",
    "system_prompt": "in the prompt",
}
FIELDS = (
    *("field", "field_messages", "field_tools", "field_system", "field_chosen", "field_rejected"),
    *("text_column", "field_human", "field_model"),
)
MESSAGES = ("message_property_mappings", "message_field_role", "message_field_content")
KEYS = {
    "path",
    "name",
    "split",
    "type",
    "data_files",
    "revision",
    "roles_to_train",
    "train_on_eos",
    "streaming",
    *FIELDS,
    *MESSAGES,
}
DATASET_KEYS = KEYS | NOT_OF_A_DATASET.keys() | IDLE_IN_A_DATASET.keys()


def stage_of(ledger: Ledger) -> str:
    """What the run learns from, by `rl`, `reward_model` and the types of its datasets."""
    rl = str(ledger.value("rl") or "").lower()
    if rl in STAGES:
        return STAGES[rl]
    if ledger.is_on("reward_model"):
        return "reward"
    types = [dataset.get("type") for dataset in datasets(ledger, "datasets")]
    if not types or all(isinstance(kind, str) and base_of(kind) in TEXT for kind in types):
        return "cpt"
    whole = ledger.is_on("train_on_inputs") and all(isinstance(kind, str) and is_chat(kind) for kind in types)
    return "cpt" if whole else "sft"


def is_chat(kind: str) -> bool:
    """Whether rows are conversations."""
    return kind.partition(":")[0].partition(".")[0] in CHAT


def datasets(ledger: Ledger, key: str) -> list[Mapping[str, Any]]:
    """The entries of a list of datasets.

    Raises:
        RecipeError: it is no such list.
    """
    found = ledger.value(key, [])
    found = [found] if isinstance(found, Mapping) else [{"path": found}] if isinstance(found, str) else found
    if not isinstance(found, list) or not all(has_path(entry) for entry in found):
        line = ledger.config.lines.get(key, 1)
        raise RecipeError(f"{ledger.config.path}:{line}: `{key}`: expected a list of datasets, each with a `path`")
    return found


def has_path(entry: object) -> bool:
    """Whether it is a dataset that says where it lies."""
    return isinstance(entry, Mapping) and isinstance(entry.get("path"), str) and bool(entry["path"].strip())


def write_sources(ledger: Ledger, stage: str) -> None:
    """`data.sources` and what is held out.

    Raises:
        RecipeError: the config names no dataset.
    """
    taken: set[str] = set()
    sources: list[dict[str, Any]] = []
    for key in ("pretraining_dataset", "datasets"):
        ledger.skip_empty([key])
        for number, dataset in enumerate(datasets(ledger, key)):
            place = f"{key}[{number}]"
            is_pretraining = key == "pretraining_dataset"
            streams = ledger.is_on("streaming") or is_pretraining
            sources += with_names(
                sources_of(ledger, place, dataset, stage, text=is_pretraining, streams=streams), taken
            )
        if isinstance(ledger.value(key), str):
            ledger.enter(key, "carried", "data.sources[].path")
    if not sources:
        raise RecipeError(f"{ledger.config.path}: it names no dataset: neither `datasets` nor `pretraining_dataset`")
    ledger.put("data.sources", sources)
    write_shares(ledger, sources)
    write_held_out(ledger, stage)


def write_held_out(ledger: Ledger, stage: str) -> None:
    """A share of the sources, or datasets of their own."""
    held_out: list[dict[str, Any]] = []
    ledger.skip_empty(["test_datasets", "val_set_size"])
    taken: set[str] = set()
    for number, dataset in enumerate(datasets(ledger, "test_datasets")):
        held_out += with_names(sources_of(ledger, f"test_datasets[{number}]", dataset, stage, text=False), taken)
    if isinstance(ledger.value("test_datasets"), str):
        ledger.enter("test_datasets", "carried", "evaluation.perplexity")
    if held_out:
        ledger.put("evaluation.perplexity", held_out, "test_datasets")
    share = ledger.number("val_set_size") or 0.0
    if 0 < share < 1:
        ledger.put("evaluation.held_out_share", share, "val_set_size; documents are chosen by the hash of their text")
        ledger.enter("val_set_size", "carried", "evaluation.held_out_share")
    elif share >= 1:
        ledger.drop(
            "val_set_size", f"{share:g} documents: give their share of all of them as `evaluation.held_out_share`"
        )
    ledger.enter("val_set_size", "carried", "nothing is held out there, as here")


def sources_of(
    ledger: Ledger, place: str, dataset: Mapping[str, Any], stage: str, *, text: bool, streams: bool = False
) -> list[dict[str, Any]]:
    """One dataset, of which each key is entered."""
    paths, files = places_of(str(dataset["path"]), dataset.get("data_files"))
    hub = is_on_the_hub(paths[0])
    if (
        not hub
        and not Path(paths[0]).suffix
        and not (is_local(paths[0]) or ":" in paths[0])
        and not Path(paths[0]).expanduser().exists()
    ):
        ledger.drop(
            f"{place}.path", f"`{paths[0]}` is not a file or folder here; a dataset on the Hub is written owner/name"
        )
    ledger.enter(
        f"{place}.path", "carried", f"data.sources: {', '.join(paths)}" if len(paths) > 1 else "data.sources[].path"
    )
    source: dict[str, Any] = {}
    if hub:
        source |= {
            key: dataset[old] for key, old in {"subset": "name", "revision": "revision"}.items() if dataset.get(old)
        }
        source |= {"data_files": files} if files else {}
        source |= {"streaming": True} if streams else {}
    split, most, left = split_of(str(dataset.get("split") or "train"), whole=hub and not streams)
    source |= {"split": split} if hub and split != "train" else {}
    source |= {"max_documents": most} if most else {}
    if left:
        told = (
            f"of a file, or of a stream, no share can be named: all of `{split}` is read; `max_documents` takes its"
            " beginning"
        )
        ledger.drop(f"{place}.split", told)
    for key, name in {"split": "split", "name": "subset", "revision": "revision", "data_files": "data_files"}.items():
        if dataset.get(key) is None:
            continue
        if key == "data_files" and not files:
            ledger.otherwise(f"{place}.{key}", "data.sources[].path")
        ledger.enter(
            f"{place}.{key}",
            "carried" if hub else "otherwise",
            f"data.sources[].{name}" if hub else "a local file has none",
        )
    source |= form_of(ledger, place, dataset, stage, text=text)
    enter_the_rest(ledger, place, dataset)
    return [{"path": path, **source} for path in paths]


def form_of(ledger: Ledger, place: str, dataset: Mapping[str, Any], stage: str, *, text: bool) -> dict[str, Any]:
    """What a row is: `text_column` or `chat`."""
    kind = dataset.get("type")
    key = f"{place}.type"
    if isinstance(kind, Mapping):
        own = chat_of_own(kind, stage)
        ledger.otherwise(key, f"data.sources[].chat: the format as a template of its columns, {', '.join(own)}")
        return {"chat": own}
    kind = str(kind or "")
    if text or stage == "cpt" and not is_chat(kind) or base_of(kind) in TEXT:
        column = str(dataset.get("text_column") or dataset.get("field") or "text")
        ledger.enter(key, "carried", "a text of one column")
        return {} if column == "text" else {"text_column": column}
    if stage in ("sft", "cpt"):
        return form_of_conversations(ledger, key, kind, dataset)
    chat = None if stage == "grpo" else chat_of_rl(kind, stage)
    if chat is None:
        ledger.drop(
            key,
            f"`{kind}` is not known here. Say which columns a row has: `chat: {{prompt: COLUMN, ...}}`"
            " (docs/stages.md)",
        )
        return {}
    renamed = {name: str(dataset.get(f"field_{name}") or column) for name, column in chat.items()}
    if chat.get("prompt") == "messages" and dataset.get("field_messages"):
        renamed["prompt"] = str(dataset["field_messages"])
    ledger.otherwise(key, f"data.sources[].chat; {TEMPLATES}")
    return {"chat": renamed}


def form_of_conversations(ledger: Ledger, key: str, kind: str, dataset: Mapping[str, Any]) -> dict[str, Any]:
    """Messages, or a question and its answer."""
    if is_chat(kind):
        family = kind.partition(":")[0].partition(".")[0]
        column = str(dataset.get("field_messages") or SHAREGPT.get(family, "messages"))
        ledger.enter(key, "carried", "data.sources[].chat")
        more = {
            name: dataset[old]
            for name, old in {"tools": "field_tools", "system": "field_system"}.items()
            if dataset.get(old)
        }
        return {"chat": {"messages": column, **more}} if more else {"chat": column}
    pairs = chat_of_pairs(kind)
    if pairs is None:
        told = (
            f"`{kind}` is not known here"
            if kind != "input_output"
            else "segments of which each is learned or not are no examples here"
        )
        remedy = (
            "Write rows of messages, or of prompt and completion, and name their columns: `chat: {prompt: COLUMN,"
            " completion: COLUMN}`"
        )
        ledger.drop(key, f"{told}. {remedy}")
        return {}
    ledger.otherwise(key, f"data.sources[].chat: {FRAME_TOLD if 'prompt' in pairs else TEMPLATES}")
    return {"chat": pairs}


def enter_the_rest(ledger: Ledger, place: str, dataset: Mapping[str, Any]) -> None:
    """The keys of a dataset that are not where it lies and what a row is."""
    for name, value in dataset.items():
        key = f"{place}.{name}"
        if value is None:
            ledger.enter(key, "carried", EMPTY)
        elif name in IDLE_IN_A_DATASET:
            ledger.otherwise(key, IDLE_IN_A_DATASET[name])
        elif name == "roles" and are_usual(value):
            ledger.otherwise(key, "read as they are")
        elif name in NOT_OF_A_DATASET:
            ledger.drop(key, NOT_OF_A_DATASET[name])
        elif name in FIELDS:
            ledger.enter(key, "carried", "data.sources[].chat or .text_column")
        elif name in MESSAGES:
            enter_messages(ledger, key, dataset)
        elif name in ("roles_to_train", "train_on_eos"):
            usual = value in ASSISTANTS if name == "roles_to_train" else value == "turn"
            ledger.enter(key, "carried" if usual else "not", TURNS)
        elif name == "streaming":
            ledger.otherwise(
                key, "large sources are read window by window; `streaming: true` keeps no file of the Hub's"
            )
        else:
            ledger.drop(key, f"axolotl has no such key of a dataset.{did_you_mean(str(name), DATASET_KEYS)}")


def are_usual(roles: object) -> bool:
    """Whether all roles have names that are known here."""
    given = roles if isinstance(roles, Mapping) else {"": None}
    return all(
        isinstance(names, list) and {str(name) for name in names} <= ROLES.get(role, {role})
        for role, names in given.items()
    )


def enter_messages(ledger: Ledger, key: str, dataset: Mapping[str, Any]) -> None:
    """What a message is made of: read by itself where it is one of the usual forms."""
    mapping = dataset.get("message_property_mappings")
    mapping = mapping if isinstance(mapping, Mapping) else {}
    role = mapping.get("role", dataset.get("message_field_role", "role"))
    content = mapping.get("content", dataset.get("message_field_content", "content"))
    others = {name: column for name, column in mapping.items() if name not in ("role", "content") and name != column}
    if (role, content) in ROLES_READ and not others:
        ledger.otherwise(key, f"messages of {{{role}, {content}}} are read as they are")
    else:
        ledger.drop(key, "messages are {role, content} or {from, value} here: rename the keys in the files")
