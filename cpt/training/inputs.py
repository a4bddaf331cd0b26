"""Whether weights, tokenizer, teacher, reward models and the user's code are those that the run began with."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import xxhash
from huggingface_hub import try_to_load_from_cache
from transformers import PreTrainedTokenizerBase, TrainingArguments

from cpt.cache import TOKENIZER
from cpt.data.readers.account import format_account
from cpt.data.readers.hub import COMMIT, PINNED, hub_files, named_revision
from cpt.data.readers.sources import kind_of
from cpt.data.rows.build import PreparedData
from cpt.errors import CheckpointError, RecipeError
from cpt.evaluation.kinds import written_by_model
from cpt.files import KnownHashes, differing_files, sha256_of
from cpt.models.build import DTYPES
from cpt.models.config import MODEL_FILES, TOKENIZER_FILES, WEIGHTS
from cpt.plugins import add_current_folder
from cpt.recipe.huggingface_keys import STAGE_CONFIGS
from cpt.recipe.keys import AUTOMATIC
from cpt.recipe.load import class_of_change
from cpt.recipe.paths import is_function, is_local, result_of_run
from cpt.recipe.schema import DocumentSource, Recipe
from cpt.runs.events import record_event
from cpt.runs.folder import Content, get, get_dict
from cpt.runs.history import read_record, recorded_inputs
from cpt.training.arguments import weights_dtype

HASHES = ".input_hashes.json"
TEACHER = "training.teacher_model_name_or_path"
REWARD_MODEL = "reward_model"  # a built-in reward
MOST_LISTED = 3
SUFFIXES = tuple(pattern.removeprefix("*") for pattern in WEIGHTS)
RESTORE = "or start another run: name=..., or --new."


@dataclass(frozen=True)
class NamedModel:
    """A model or tokenizer that the recipe names."""

    key: str
    path: str
    revision: str | None
    patterns: tuple[str, ...] = (*WEIGHTS, "*.index.json", *MODEL_FILES)
    """The files that decide what is learned or exported."""

    @property
    def is_on_hub(self) -> bool:
        return not is_local(self.path)

    def files(self) -> dict[str, Path]:
        """The files by name; empty if they are not on this machine yet."""
        folder = self.snapshot if self.is_on_hub else Path(self.path).expanduser()
        if folder is None:
            return {}
        if folder.is_file():
            return {folder.name: folder}
        matching = set[Path]()
        for pattern in self.patterns:
            matching.update(folder.glob(pattern))
        return {path.name: path for path in sorted(matching) if path.is_file()}

    @property
    def snapshot(self) -> Path | None:
        """The folder of the revision in the cache of the Hub; its name is the commit."""
        for name in ("config.json", *TOKENIZER):
            cached = try_to_load_from_cache(self.path, name, revision=self.revision)
            if isinstance(cached, str):
                return Path(cached).parent
        return None


def origins_of(recipe: Recipe) -> list[NamedModel]:
    origins = []
    model = recipe.model
    tokenizer = recipe.tokenizer
    if model.path is not None:
        origin = NamedModel("model.path", model.path, model.revision)
        origins.append(replace(origin, patterns=MODEL_FILES) if model.from_scratch else origin)
    if tokenizer.path not in (None, model.path):
        origin = NamedModel(
            "tokenizer.path", str(tokenizer.path), tokenizer.revision, TOKENIZER_FILES
        )
        origins.append(origin)
    teacher = result_of_run(recipe.training.get("teacher_model_name_or_path"))
    if teacher is not None:
        origins.append(NamedModel(TEACHER, teacher, recipe.training.get("teacher_model_revision")))
    for number, reward in enumerate(recipe.rewards):
        if reward.name == REWARD_MODEL:
            path = str(result_of_run(str(reward.options["path"])))
            origins.append(
                NamedModel(f"rewards[{number}].path", path, reward.options.get("revision"))
            )
    return origins


def with_commit(recipe: Recipe, key: str, commit: str) -> Recipe:
    """The recipe with this commit of a model or tokenizer."""
    revision = {"revision": commit}
    if key == "model.path":
        return recipe.model_copy(update={"model": recipe.model.model_copy(update=revision)})
    if key == "tokenizer.path":
        return recipe.model_copy(update={"tokenizer": recipe.tokenizer.model_copy(update=revision)})
    if key == TEACHER:
        training = {**recipe.training, "teacher_model_revision": commit}
        return recipe.model_copy(update={"training": training})
    rewards = []
    for number, reward in enumerate(recipe.rewards):
        rewards.append(
            reward.model_copy(update=revision) if key == f"rewards[{number}].path" else reward
        )
    return recipe.model_copy(update={"rewards": rewards})


@dataclass
class RunInputs:
    """The inputs of a start, and those recorded by earlier starts."""

    folder: Path
    recipe: Recipe
    """As written, with the names of branches."""
    recorded: Content
    """Empty for the first start."""
    is_renewed: bool = False
    """Whether changed code was accepted, so that the inputs are to be recorded again."""

    @cached_property
    def hashes(self) -> KnownHashes:
        return KnownHashes(self.folder / HASHES, sha256_of)

    def pinned(self, recipe: Recipe, *, from_cache: bool = False) -> Recipe:
        """The recipe with the commits that the first start took from the Hub, or that it takes now from the cache.

        Datasets stay at their recorded commits in this process; in the recipe, a commit would name other tokens.
        """
        PINNED.clear()
        PINNED.update(self.recorded.get("datasets", {}))
        for origin in self.origins:
            if not origin.is_on_hub or COMMIT.fullmatch(origin.revision or ""):
                continue
            commit = self.recorded_entry(origin).get("commit")
            if commit is None and from_cache and origin.snapshot is not None:
                commit = origin.snapshot.name
            if commit is not None:
                recipe = with_commit(recipe, origin.key, commit)
        return recipe

    @cached_property
    def origins(self) -> list[NamedModel]:
        return origins_of(self.recipe)

    def recorded_entry(self, origin: NamedModel) -> Content:
        entry = get_dict(self.recorded, "files", origin.key)
        is_same = (entry.get("path"), entry.get("revision")) == (origin.path, origin.revision)
        if is_same:
            return entry
        return {}

    # --- compare -----------------------------------------------------------------------------------------------------

    def refuse_changed(self, step: int, accept: bool | Callable[[str], bool]) -> None:
        """Compare with the recorded inputs, before anything is loaded. For the main process.

        Raises:
            CheckpointError: files of a model or tokenizer have changed.
            RecipeError: the user's code has changed, and is not accepted.
        """
        for origin in self.origins:
            self.refuse_changed_files(origin)
        changed = [code for code in self.code if self.has_changed(code)]
        decisive = [code for code in changed if not code.is_free]
        if decisive:
            files = ", ".join(f"{code.file} (`{code.key}`)" for code in decisive)
            text = f"{self.folder}: {files} has changed since the run began"
            is_accepted = accept(f"{text}.") if callable(accept) else accept
            if not is_accepted:
                raise RecipeError(
                    f"{text}. Train with it from step {step + 1:,} on: --change; or restore it, {RESTORE}"
                )
        for code in changed:
            message = f"{code.file} has changed; it is used from step {step + 1:,} on."
            record_event(self.folder, "changed_code", message, step=step)
        self.is_renewed = bool(changed)

    def refuse_changed_files(self, origin: NamedModel) -> None:
        entry = self.recorded_entry(origin)
        then = entry.get("sha256", {})
        if entry:
            is_whole = not origin.is_on_hub  # a cache has what was needed so far
            origin = replace(origin, revision=entry["commit"] or origin.revision)
        else:  # recorded by an older version: weights only
            section = {"model.path": "weights", TEACHER: "teacher"}.get(origin.key, "")
            then = get_dict(self.recorded, section, "sha256")
            is_whole = False
        files = origin.files()
        if not then or origin.is_on_hub and not files:
            return
        compared = files if is_whole else {name: files[name] for name in files if name in then}
        hashes_now = self.hashes.hashes(compared)
        if origin.is_on_hub:
            then = {name: then[name] for name in hashes_now}
        changed = differing_files(then, hashes_now)
        if changed:
            listed = ", ".join(
                how_changed(name, then, hashes_now) for name in changed[:MOST_LISTED]
            )
            raise CheckpointError(
                f"{self.folder} began with other files in {origin.path} (`{origin.key}`): {listed}. Restore them,"
                f" {RESTORE}"
            )

    def refuse_changed_sets(self, held_out: Mapping[str, Mapping[str, str]]) -> None:
        """Compare the files of held-out sets: those of training data are part of the data's fingerprint."""
        recorded = get_dict(self.recorded, "data", "held_out")
        for name in recorded.keys() & held_out.keys():
            if sorted(recorded[name].values()) != sorted(held_out[name].values()):
                raise CheckpointError(
                    f"{self.folder} began with other documents in the held-out set `{name}`, so its losses cannot be"
                    f" compared. Restore the files; or give the new set another `name` and --change; {RESTORE}"
                )

    def has_changed(self, code: "UserCode") -> bool:
        then = get(self.recorded, "code", code.module)
        return then is not None and then != sha256_of(code.file)

    @cached_property
    def code(self) -> list["UserCode"]:
        return user_code(self.recipe)

    # --- describe ----------------------------------------------------------------------------------------------------

    def describe(self, pinned: Recipe) -> Content:
        """Hashes of all files; `commit` of those on the Hub. `pinned` is the recipe that was loaded."""
        files = {}
        for origin, loaded in zip(self.origins, origins_of(pinned), strict=True):
            snapshot = loaded.snapshot if loaded.is_on_hub else None
            files[origin.key] = {
                "path": origin.path,
                "revision": origin.revision,
                "commit": None if snapshot is None else snapshot.name,
                "sha256": self.hashes.hashes(loaded.files()),
            }
        return {
            "files": files,
            "datasets": dict(commits_of_datasets(self.recipe)),
            "code": {code.module: sha256_of(code.file) for code in self.code},
        }


def commits_of_datasets(recipe: Recipe) -> Iterator[tuple[str, str]]:
    sources: list[DocumentSource] = [*recipe.data.sources, *recipe.evaluation.perplexity]
    for source in sources:
        if kind_of(source.path) == "hub":
            yield named_revision(source), hub_files(source, source.path).commit


def read_inputs_again(run: Path) -> int:
    """Read all files of a run's models and tokenizers, and return their number; CheckpointError if one differs."""
    record = read_record(run)
    recorded = recorded_inputs(run, None)
    if record is None or "files" not in recorded:
        raise CheckpointError(
            f"{run} has no record of its inputs. --deep needs the folder of a run."
        )
    inputs = RunInputs(run, record.recipe, recorded)
    inputs.hashes.known.clear()
    for origin in inputs.origins:
        inputs.refuse_changed_files(origin)
    return len(inputs.hashes.known)


def how_changed(name: str, hashes_before: Mapping[str, str], hashes_now: Mapping[str, str]) -> str:
    if name not in hashes_before:
        return f"{name} is new"
    if name in hashes_now:
        return f"{name} differs"
    return f"{name} is missing"


@dataclass(frozen=True)
class UserCode:
    """A module of the user that the recipe names."""

    module: str
    file: Path
    key: str
    is_free: bool
    """Whether it changes no step, like a callback."""


def user_code(recipe: Recipe) -> list[UserCode]:
    """The files of `package.module:function` in a recipe; what these import is not followed."""
    code_by_module: dict[str, UserCode] = {}
    for key, text in texts_in(recipe.model_dump(mode="json", by_alias=True)):
        is_module = key == "model.import" or key == "stage" and text not in STAGE_CONFIGS
        if not is_module and not is_function(text):
            continue
        module = text.partition(":")[0]
        file = file_of_module(module)
        is_free = class_of_change(key) == "free"
        code_before = code_by_module.get(module)
        if file is not None and (code_before is None or code_before.is_free):
            code_by_module[module] = UserCode(module, file, key, is_free)
    return list(code_by_module.values())


def texts_in(content: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Each text of nested content with its key, such as `monitoring.callbacks.0.name`."""
    if isinstance(content, str):
        yield key, content
    elif isinstance(content, Mapping):
        for name, value in content.items():
            yield from texts_in(value, f"{key}.{name}".removeprefix("."))
    elif isinstance(content, list):
        for number, value in enumerate(content):
            yield from texts_in(value, f"{key}.{number}")


def file_of_module(name: str) -> Path | None:
    """None if it cannot be imported, which is reported later, or belongs to cpt, whose version is recorded."""
    if name.partition(".")[0] == "cpt":
        return None
    add_current_folder()
    try:
        spec = find_spec(name)
    except (ImportError, ValueError, AttributeError):
        return None
    if spec is None or spec.origin is None or not Path(spec.origin).is_file():
        return None
    return Path(spec.origin)


def describe_inputs(
    inputs: RunInputs,
    recipe: Recipe,
    data: PreparedData,
    tokenizer: PreTrainedTokenizerBase,
    arguments: TrainingArguments,
) -> dict[str, Any]:
    """Return hashes of all inputs except the recipe, and the values chosen for open settings."""
    fields = (
        "documents",
        "held_out",
        "tokens",
        "share",
        "licence",
        "is_estimate",
        "dropped",
        "files",
    )
    sources = {}
    for source in data.sources:
        description = {field: getattr(source, field) for field in fields}
        description["text"] = source.text and asdict(source.text)
        description["account"] = format_account(source)
        sources[source.name] = description
    left_out = {}
    for name, held_out_set in data.held_out.items():
        if held_out_set.left_out:
            left_out[name] = held_out_set.left_out
    model = recipe.model
    described = inputs.describe(recipe)
    return {
        "data": {
            "fingerprint": data.fingerprint,
            "tokens": data.num_tokens,
            "sources": sources,
            "held_out": data.held_out_files,
            "written_by_model": written_by_model(recipe),
            "left_out": left_out,
        },
        "tokenizer": {"path": tokenizer.name_or_path, "xxh3": hash_of_tokenizer(tokenizer)},
        "weights": {
            "path": model.path,
            "revision": model.revision,
            "sha256": weights_in(described, "model.path"),
            "dtype": str(DTYPES.get(model.dtype, weights_dtype(recipe, arguments))).removeprefix(
                "torch."
            ),
        },
        "training": {
            **{key: recipe.training[key] for key in AUTOMATIC if key in recipe.training},
            "per_device_train_batch_size": arguments.per_device_train_batch_size,
            "gradient_accumulation_steps": arguments.gradient_accumulation_steps,
            "deepspeed": arguments.deepspeed or None,
        },
        **described_teacher(described),
        **described,
    }


def weights_in(described: Content, key: str) -> dict[str, str]:
    hashes = get_dict(described, "files", key, "sha256")
    return {name: digest for name, digest in hashes.items() if name.endswith(SUFFIXES)}


def described_teacher(described: Content) -> Content:
    entry = get_dict(described, "files", TEACHER)
    if not entry:
        return {}
    revision = entry["commit"] or entry["revision"]
    hashes = weights_in(described, TEACHER)
    return {"teacher": {"path": entry["path"], "revision": revision, "sha256": hashes}}


def hash_of_tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    return xxhash.xxh3_128_hexdigest(tokenizer.backend_tokenizer.to_str().encode())
