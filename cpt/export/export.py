"""Export a trained model to a folder that plain transformers loads, completely or not at all; average checkpoints."""

import json
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from jinja2 import Environment
from peft import PeftModel
from safetensors import SafetensorError
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer

from cpt.checkpoints.model_folder import (
    ADAPTER_CONFIG,
    HEADS,
    Tensors,
    config_json,
    kind_of,
    write_tensors,
)
from cpt.checkpoints.resume import complete_checkpoints
from cpt.checkpoints.retention import published_in
from cpt.checkpoints.transaction import in_words, reason_of
from cpt.distributed import is_main_process, main_process_decides, print_once, same_command
from cpt.errors import CheckpointError
from cpt.evaluation.scoring import read_course
from cpt.export.generation import end_at_turns
from cpt.export.older_readers import rewrite_json, write_older_keys
from cpt.export.proof_of_final import check_final, trained_logits
from cpt.files import locked, make_all_durable, rename_over, replacing, write_atomic
from cpt.hf_internals import without_zero3
from cpt.models.adapters import load_adapter, merge_lora
from cpt.models.build import build_model, scoring_model
from cpt.models.config import CONFIGS, MODEL_FILES
from cpt.models.families import export_native
from cpt.models.new_rows import carry_extension
from cpt.recipe.load import saved_recipe
from cpt.recipe.paths import is_local
from cpt.recipe.schema import Model, Recipe
from cpt.runs.folder import (
    ENVIRONMENT,
    EXPORT,
    INPUTS,
    METRICS,
    RECIPE,
    VERDICT_PAGE,
    Content,
    get,
    get_dict,
    read_object,
)
from cpt.runs.record import write_json

# folder in a run's export; folder in a run
ADAPTER = "adapter"
AVERAGE = "average"
BASE_WEIGHTS = "base_weights.json"  # saved with an adapter: sha256 of its base's weight files
SERVED = {"use_cache": True, "output_router_logits": False}  # config values that training changes


def export_model(
    trainer: Trainer,
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    seal: Callable[[Path], None] = lambda _: None,
) -> None:
    """Write the trained model, its tokenizer and configs to `folder`, completely or not at all.

    Our model families are written as the equal native architecture, so this package is not needed to load them. A LoRA
    adapter is merged into its base, and also saved in `adapter/`. The model is loaded again and compared with the
    trained one. Every process must call this function: ZeRO-3 gathers from all.

    Args:
        seal: called by the main process with the complete folder before its final rename.

    Raises:
        CheckpointError: the disk is full or read-only, or the exported model has other logits than the trained one;
            raised on all processes.
    """
    trained = trained_logits(trainer, tokenizer)
    unfinished = unfinished_name(folder)
    adapted: PeftModel | None = None
    weights_folder = unfinished
    if isinstance(trainer.model, PeftModel):
        adapted = trainer.model
        weights_folder = unfinished / ADAPTER
    problem: OSError | SafetensorError | None = None
    try:
        if is_main_process():
            shutil.rmtree(unfinished, ignore_errors=True)
        trainer.save_model(str(weights_folder))
    except (OSError, SafetensorError) as failure:
        problem = failure  # raised below: the other processes wait there for the main one

    def publish_export() -> None:
        with new_folder(folder, of_run=True, is_begun=True):
            if problem is not None:
                raise problem
            complete(unfinished, adapted, recipe, tokenizer, run=folder.parent)
            check_final(unfinished, trained)
            seal(unfinished)

    main_process_decides(publish_export)


def unfinished_name(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.unfinished")


@contextmanager
def new_folder(folder: Path, *, of_run: bool = False, is_begun: bool = False) -> Iterator[Path]:
    """A hidden folder, renamed to `folder` at the end or removed on an error; CheckpointError if it is not writable,
    LaunchError if another process is writing it.

    Args:
        of_run: the error message also names the checkpoint with the trained weights.
        is_begun: keep the existing content of the hidden folder.
    """
    unfinished = unfinished_name(folder)
    lock = nullcontext() if of_run else output_folder_locked(folder)  # a run has its own lock
    try:
        with lock:
            if not is_begun:
                shutil.rmtree(unfinished, ignore_errors=True)
            try:
                yield unfinished
                make_all_durable(unfinished)
                rename_over(unfinished, folder)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
    except (OSError, SafetensorError) as failure:
        # Libraries also raise OSError for unreadable files, without a number.
        is_unnumbered = isinstance(failure, OSError) and failure.errno is None
        is_of_storage = reason_of(failure) == "storage" and not is_unnumbered
        if not of_run and not is_of_storage:
            raise
        remedy = "Free disk space, or choose another folder."
        checkpoints = published_in(folder.parent) if of_run else []
        if checkpoints:
            newest = checkpoints[-1].folder
            remedy = (
                f"{newest} has the trained weights. Free space. {same_command()} then only exports."
            )
        raise CheckpointError(
            f"{folder} could not be written: {in_words(failure)}. {remedy}"
        ) from failure


@contextmanager
def output_folder_locked(folder: Path) -> Iterator[None]:
    lock = folder.with_name(f".{folder.name}.lock")
    with locked(
        lock, f"{folder}: another command is writing it. Wait for it, or use another folder."
    ):
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)


def complete(
    unfinished: Path,
    adapted: PeftModel | None,
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerBase,
    *,
    run: Path,
) -> None:
    if adapted:
        weights = read_object(run / INPUTS).get("weights")
        if weights:
            write_json(unfinished / ADAPTER / BASE_WEIGHTS, weights)
        # Build the base as the run did; its seed decides the rows that were added to the vocabulary.
        dtype = next(adapted.get_base_model().parameters()).dtype
        adapter_config = json.loads((unfinished / ADAPTER / ADAPTER_CONFIG).read_text())
        scores = adapter_config.get("task_type") == "SEQ_CLS"  # a reward model
        with without_zero3():
            base = build_base(recipe.model, tokenizer, seed=recipe.seed, dtype=dtype, scores=scores)
            model = merge_lora(load_adapter(base, unfinished / ADAPTER))
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
    finish_trained(unfinished, tokenizer, recipe)
    if (run / RECIPE).is_file():
        write_model_card(unfinished, run, run.name)


def finish_trained(folder: Path, tokenizer: PreTrainedTokenizerBase, recipe: Recipe) -> None:
    finish(folder)
    end_at_turns(folder, tokenizer, recipe)
    carry_extension(recipe.model.path, folder, trained=True)


def finish(folder: Path) -> None:
    """Make a saved model loadable by others: native architecture, tied head stored once, no files of the training."""
    for leftover in folder.rglob("training_args.bin"):  # a pickle, unsafe to load
        leftover.unlink()
    export_native(folder)
    store_tied_head_once(folder)
    for name in CONFIGS:
        rewrite_json(folder / name, as_served)
    write_older_keys(folder)


def as_served(config: Content) -> Content:
    return config | {key: value for key, value in SERVED.items() if key in config}


def store_tied_head_once(folder: Path) -> None:
    """Remove the second copy of a tied head, which accelerate saves under ZeRO-1 and 2."""
    if not config_json(folder).get("tie_word_embeddings"):
        return
    tensors = Tensors(folder)
    heads = [name for name in tensors.files if name.endswith(HEADS)]
    copies = {head for head in heads if has_equal_tensor(tensors, head)}
    if not copies:
        return
    remaining = {}
    for name, shape in tensors.shapes.items():
        if name not in copies:
            remaining[name] = (shape, tensors.dtypes[name])
    old_files = {*tensors.files.values(), *folder.glob("*.safetensors.index.json")}
    largest = max(file.stat().st_size for file in old_files)
    with replacing(old_files, folder) as scratch:
        write_tensors(scratch, remaining, tensors.read, largest)


def has_equal_tensor(tensors: Tensors, name: str) -> bool:
    for other, shape in tensors.shapes.items():
        if other == name or shape != tensors.shapes[name]:
            continue
        if torch.equal(tensors.read(other), tensors.read(name)):
            return True
    return False


def build_base(
    model: Model,
    tokenizer: PreTrainedTokenizerBase,
    *,
    seed: int,
    dtype: torch.dtype,
    scores: bool = False,
) -> PreTrainedModel:
    """Build the model that the adapter was trained on, with its extended vocabulary; for a reward model (`scores`),
    the new head is saved with the adapter."""
    section = model.model_copy(update={"lora": None, "hashes": {}, "dtype": "auto"})
    build = scoring_model if scores else build_model
    base = build(section, tokenizer, seed=seed, dtype=dtype)
    assert isinstance(base, PreTrainedModel)
    return base


def export_average(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, run: Path) -> None:
    """Write the mean of the last checkpoints if the recipe requests it; every process must call it."""
    if recipe.checkpoints.average is None:
        return
    folders = complete_checkpoints(run)[-recipe.checkpoints.average :]
    if len(folders) < 2:  # only a warning, as the run is finished and its model written
        print_once(
            f"warning: no average written: {run} has {len(folders)} checkpoint. Save more often, or train longer."
        )
        return

    def write() -> None:
        with new_folder(run / AVERAGE, of_run=True) as unfinished:
            write_average(folders, unfinished, dtype=None)
            tokenizer.save_pretrained(unfinished)
            finish_trained(unfinished, tokenizer, recipe)
        names = ", ".join(folder.name for folder in folders)
        print_once(f"The mean of {names} is in {run / AVERAGE}.")

    main_process_decides(write)


def write_average(folders: Sequence[Path], output: Path, *, dtype: torch.dtype | None) -> None:
    """Write the mean of the models' weights, as in LAWA and model soups (arXiv 2209.14981, 2203.05482), with the last
    one's config and tokenizer. Sums are in float64; the dtype is that of the last model if `dtype` is None. Raises
    CheckpointError for fewer than two models, folders without a model, or different shapes."""
    if len(folders) < 2:
        raise CheckpointError(
            "an average needs at least two checkpoints: cpt merge --method average CHECKPOINT ..."
        )
    models = list(map(open_model, folders))
    last = models[-1]
    for other in models[:-1]:
        refuse_other_shapes(other, last)
    output.mkdir(parents=True, exist_ok=True)

    def mean(name: str) -> torch.Tensor:
        if not last.dtypes[name].is_floating_point:
            return last.read(name)
        total = torch.zeros(last.shapes[name], dtype=torch.float64)
        for model in models:
            total += model.read(name)
        return total / len(models)

    shapes = {
        name: (shape, written_dtype(last, name, dtype)) for name, shape in last.shapes.items()
    }
    write_tensors(output, shapes, mean)
    copy_model_files(last.folder, output)


def open_model(folder: Path) -> Tensors:
    """The tensors of a whole model; CheckpointError if the folder has something else."""
    kind = kind_of(folder)
    reason = None
    if kind == "adapter":
        reason = "is an adapter. Merge it"
    elif kind == "zero":
        reason = "has the parts of a ZeRO checkpoint. Consolidate it"
    if reason is not None:
        raise CheckpointError(f"{folder} {reason} first: cpt export {folder} --output FOLDER")
    return Tensors(folder)


def refuse_other_shapes(first: Tensors, second: Tensors, apart_from: Sequence[str] = ()) -> None:
    """Raise CheckpointError with the first weight whose name or shape differs: such weights cannot be added.

    Args:
        apart_from: names of weights whose shapes may differ.
    """
    for name in sorted(first.shapes.keys() | second.shapes.keys()):
        first_shape = format_shape(first, name)
        second_shape = format_shape(second, name)
        may_differ = name in apart_from and MISSING not in (first_shape, second_shape)
        if first_shape != second_shape and not may_differ:
            raise CheckpointError(
                f"{name} is {first_shape} in {first.folder} and {second_shape} in {second.folder}:"
                " different shapes. Use models of one run, or export both: cpt export."
            )


MISSING = "not"  # `head.weight is not in FOLDER`


def format_shape(tensors: Tensors, name: str) -> str:
    if name not in tensors.shapes:
        return MISSING
    return str(list(tensors.shapes[name]))


def written_dtype(tensors: Tensors, name: str, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype to write: that of integers and masks is unchanged."""
    stored = tensors.dtypes[name]
    if dtype is not None and stored.is_floating_point:
        return dtype
    return stored


def copy_model_files(folder: Path, output: Path) -> None:
    for pattern in MODEL_FILES:
        for file in folder.glob(pattern):
            if file.is_file():
                shutil.copy(file, output / file.name)


# --- the model card: data with their licences, recipe, base, metrics, limits, and how to serve it ---


HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
UNKNOWN_LICENCE = "not stated"

# Held-out set -> bits per byte before the first step and after the last step.
Evaluations = dict[str, tuple[float | None, float]]


def write_model_card(
    folder: Path, run: Path | None, name: str, *, step: int | None = None, adapter: bool = False
) -> None:
    """Write README.md into an exported folder, for the checkpoint of a step or the end of the run. Without a run,
    data, recipe and metrics are unknown."""
    recipe: Recipe | None = None
    environment: Content = {}
    sources: Content = {}
    evaluations: Evaluations = {}
    verdict = ""
    if run is not None:
        recipe = saved_recipe(run)
        environment = read_object(run / ENVIRONMENT)
        sources = get_dict(read_object(run / INPUTS), "data", "sources")
        evaluations = evaluations_until(run, step)
        if step is None:
            verdict = verdict_section(run)
    base: str | None = None
    settings: dict[str, Any] = {}
    if recipe is not None:
        base = recipe.model.path
        settings = recipe.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    versions = get_dict(environment, "versions")
    installed = []
    for package, number in versions.items():
        if number:
            installed.append(f"{package} {number}")
    unlicensed = [name for name, source in sources.items() if not source.get("licence")]
    has_final_name = not folder.name.startswith(".") and folder.name != EXPORT
    jinja = Environment(trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    template = Path(__file__).with_name("model_card.md.jinja").read_text(encoding="utf-8")
    page = jinja.from_string(template).render(
        header=card_data(name, recipe, evaluations, adapter).to_yaml(),
        name=name,
        served=folder.name if has_final_name else name,
        is_adapter=adapter,
        recipe=recipe,
        written_recipe=yaml.safe_dump(settings, sort_keys=False, allow_unicode=True).strip(),
        base=base,
        is_new=recipe is not None and (base is None or recipe.model.from_scratch),
        licence=base_licence(base),
        unknown_licence=UNKNOWN_LICENCE,
        sources=sources,
        unlicensed=", ".join(unlicensed),
        versions=", ".join(installed),
        commit=get(environment, "git", "commit"),
        step=step,
        evaluations=evaluations,
        verdict=verdict,
    )
    write_atomic(folder / "README.md", str(ModelCard(page)), reuse_space=True)


def evaluations_until(run: Path, step: int | None) -> Evaluations:
    """Return the evaluations before the first step and after the given one, by default the last."""
    course = read_course(run / METRICS)
    points = [point for point in course if step is None or point.step == step]
    if not points:
        return {}
    point = points[-1]
    before: dict[str, float] = {}
    if course[0].step == 0 and point.step:
        before = course[0].bits_per_byte
    return {name: (before.get(name), after) for name, after in point.bits_per_byte.items()}


def verdict_section(run: Path) -> str:
    """Return the verdict's page as a section, without what the run's owner may do next."""
    path = run / VERDICT_PAGE
    if not path.is_file():
        return ""
    page = path.read_text(encoding="utf-8").strip()
    page = re.sub(r"^Next: .*\n\n", "", page, count=1, flags=re.MULTILINE)
    return re.sub(r"^#+ ", lambda marks: f"##{marks[0]}", page, flags=re.MULTILINE)


def card_data(
    name: str, recipe: Recipe | None, evaluations: Evaluations, adapter: bool
) -> ModelCardData:
    """The metadata header for the Hub."""
    base: str | None = None
    paths: list[str | None] = []
    tags = ["cpt"]
    if recipe is not None:
        base = recipe.model.path
        paths = [base, *(source.path for source in recipe.data.sources)]
        tags.append("continued-pretraining" if base else "pretraining")
    on_hub = {path for path in paths if path and HUB_ID.fullmatch(path) and not Path(path).exists()}
    results: list[EvalResult] = []
    for held_out_set, (_, after) in evaluations.items():
        result = EvalResult(
            "text-generation",
            metric_type="bits_per_byte",
            metric_name="bits per byte",
            dataset_type=held_out_set,
            dataset_name=held_out_set,
            metric_value=round(after, 5),
        )
        results.append(result)
    return ModelCardData(
        model_name=name,
        library_name="peft" if adapter else "transformers",
        pipeline_tag="text-generation",
        base_model=base if base in on_hub else None,
        datasets=sorted(on_hub - {base}) or None,
        license=base_licence(base),
        tags=tags,
        eval_results=results or None,
    )


def base_licence(base: str | None) -> str | None:
    """The licence in the card of the base's weights, which also applies to models trained from them."""
    if base is None or not is_local(base):
        return None
    card = Path(base).expanduser() / "README.md"
    if not card.is_file():
        return None
    try:
        licence = ModelCard.load(card, ignore_metadata_errors=True).data.license
    except (ValueError, yaml.YAMLError):  # no valid metadata header
        return None
    if isinstance(licence, str):
        return licence
    return None
