"""Turn what was trained into a folder that plain transformers loads, whole or not at all; average checkpoints."""

import json
import shutil
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from peft import PeftModel, get_peft_model_state_dict, load_peft_weights
from peft.mapping import PEFT_TYPE_TO_PREFIX_MAPPING
from safetensors import SafetensorError
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer

from cpt.checkpoints.agreement import in_words
from cpt.checkpoints.model_folder import ADAPTER_CONFIG, HEADS, Tensors, kind_of, write_tensors
from cpt.checkpoints.resume import complete_checkpoints
from cpt.checkpoints.rotation import published_in
from cpt.checkpoints.transaction import rename_over
from cpt.errors import CheckpointError
from cpt.export.model_card import write_model_card
from cpt.models.adapters import merge_lora
from cpt.models.build import build_model
from cpt.models.families.native import export_native
from cpt.models.new_rows import EXTENSION, carry_extension
from cpt.models.scoring import scoring_model
from cpt.models.zero3 import without_zero3
from cpt.ranks import is_main_process, main_process_decides, main_process_first, same_command, tell
from cpt.recipe.schema import Model, Recipe
from cpt.runs.folder import INPUTS, RECIPE, read_object
from cpt.runs.record import write_json

ADAPTER = "adapter"
ONLY_FOR_TRAINING = {
    "use_cache": True,
    "output_router_logits": False,
}  # value of the configs that a served model needs instead
CONFIGS = ("config.json", "generation_config.json")


def export_model(
    trainer: Trainer,
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    seal: Callable[[Path], None] = lambda _: None,
) -> None:
    """Write the trained model, its tokenizer and configs to `folder`, which is there whole or not at all.

    Families of our own are written as the native architecture that they equal, so that nobody needs this package to
    load them. A LoRA adapter is merged into its base, and kept beside in `adapter/`. Every process must call it:
    ZeRO-3 gathers from all.

    Args:
        seal: called with the complete folder before it gets its name, by the main process.

    Raises:
        CheckpointError: the disk is full or read-only; raised on all processes.
    """
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    adapted = trainer.model if isinstance(trainer.model, PeftModel) else None
    problem: OSError | SafetensorError | None = None
    try:
        if is_main_process():
            shutil.rmtree(unfinished, ignore_errors=True)
        trainer.save_model(str(unfinished / ADAPTER if adapted else unfinished))
    except (
        OSError,
        SafetensorError,
    ) as failure:  # of the main process, which writes last: the others wait to hear of it below
        problem = failure

    def publish_export() -> None:
        try:
            if problem is not None:
                raise problem
            complete(unfinished, adapted, recipe, tokenizer, run=folder.parent)
            seal(unfinished)
            rename_over(unfinished, folder)
        except (OSError, SafetensorError) as failure:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise not_exported(folder, failure) from failure

    main_process_decides(publish_export)


def complete(
    unfinished: Path, adapted: PeftModel | None, recipe: Recipe, tokenizer: PreTrainedTokenizerBase, *, run: Path
) -> None:
    """Add to the saved weights what others need to load and understand them."""
    if adapted:
        record_base_weights(run, unfinished / ADAPTER)
        dtype = next(adapted.get_base_model().parameters()).dtype
        model = merge_into_base(unfinished / ADAPTER, recipe.model, tokenizer, seed=recipe.seed, dtype=dtype)
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
    finish(unfinished)
    carry_extension(recipe.model.path, unfinished)
    if (run / RECIPE).is_file():
        write_model_card(unfinished, run, run.name)


def not_exported(folder: Path, failure: OSError | SafetensorError) -> CheckpointError:
    """What went wrong, and that nothing of the training is lost."""
    newest = published_in(folder.parent)[-1:]
    kept = f"{newest[0].folder} holds all that was trained: " if newest else ""
    remedy = (
        f"make room. {same_command()} goes on from there and only exports."
        if newest
        else "Mend that, and start the run again."
    )
    return CheckpointError(f"the model could not be written to {folder}: {in_words(failure)}. {kept}{remedy}")


def record_base_weights(run: Path, adapter: Path) -> None:
    """Put the base's hashes beside the adapter, so that it is never merged into another model."""
    if weights := read_object(run / INPUTS, []).get("weights"):
        write_json(adapter / BASE_WEIGHTS, weights)


def finish(folder: Path) -> None:
    """Make a saved model of a run one that others load: native architecture, a tied head stored once, no leftovers of
    the training."""
    for leftover in folder.rglob("training_args.bin"):  # a pickle, which nobody should have to trust
        leftover.unlink()
    export_native(folder)
    store_tied_head_once(folder)
    for path in (folder / name for name in CONFIGS if (folder / name).is_file()):
        config = json.loads(path.read_text())
        config |= {key: value for key, value in ONLY_FOR_TRAINING.items() if key in config}
        path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def store_tied_head_once(folder: Path) -> None:
    """Leave out a head that is the embedding over again, as saved under ZeRO-1 and 2: accelerate clones what it saves,
    and so unties it."""
    if not json.loads((folder / "config.json").read_text()).get("tie_word_embeddings"):
        return
    tensors = Tensors(folder)
    copies = {head for head in tensors.files if head.endswith(HEADS) and has_twin(tensors, head)}
    if not copies:
        return
    kept = {name: (shape, tensors.dtypes[name]) for name, shape in tensors.shapes.items() if name not in copies}
    old = [*set(tensors.files.values()), *folder.glob("*.safetensors.index.json")]
    with TemporaryDirectory(dir=folder.parent) as scratch:
        write_tensors(Path(scratch), kept, tensors.read, max(file.stat().st_size for file in old))
        for file in old:
            file.unlink()
        for file in Path(scratch).iterdir():
            shutil.move(file, folder / file.name)


def has_twin(tensors: Tensors, name: str) -> bool:
    alike = [other for other, shape in tensors.shapes.items() if other != name and shape == tensors.shapes[name]]
    return any(torch.equal(tensors.read(other), tensors.read(name)) for other in alike)


BASE_WEIGHTS = "base_weights.json"  # beside an adapter: the sha256 of the weight files that it was trained on


def merge_into_base(
    adapter: Path, model: Model, tokenizer: PreTrainedTokenizerBase, *, seed: int, dtype: torch.dtype
) -> PreTrainedModel:
    """Build the base model anew, as the run did, and merge the saved adapter into it; one process does it alone.

    Args:
        adapter: folder that peft saved.
        seed: of the run; decides rows that the vocabulary grew by.
    """
    with without_zero3():
        return merge_lora(
            put_on(build_base(model, tokenizer, seed=seed, dtype=dtype, scores=is_of_scoring_model(adapter)), adapter)
        )


def is_of_scoring_model(adapter: Path) -> bool:
    """Whether the adapter was trained on a reward model."""
    return bool(json.loads((adapter / ADAPTER_CONFIG).read_text()).get("task_type") == "SEQ_CLS")


def build_base(
    model: Model, tokenizer: PreTrainedTokenizerBase, *, seed: int, dtype: torch.dtype, scores: bool = False
) -> PreTrainedModel:
    """The model that the adapter was trained on, grown vocabulary included.

    Args:
        scores: it was a reward model, whose new head is saved with the adapter.
    """
    build = scoring_model if scores else build_model
    base = build(
        model.model_copy(update={"lora": None, "hashes": {}, "dtype": "auto"}), tokenizer, seed=seed, dtype=dtype
    )
    assert isinstance(base, PreTrainedModel)
    return base


def put_on(base: PreTrainedModel, adapter: Path) -> PeftModel:
    """The base with the saved adapter.

    Raises:
        CheckpointError: the adapter is of another model: its layers or their shapes are not there.
    """
    name = json.loads((adapter / ADAPTER_CONFIG).read_text()).get("base_model_name_or_path")
    refusal = f"{adapter} is an adapter of another base (it was trained on {name}), not of {base.name_or_path}"
    try:
        with warnings.catch_warnings():  # peft asks for what transformers calls by another name now
            warnings.filterwarnings(
                "ignore", category=FutureWarning, message=r".*gradient_checkpointing` is deprecated.*"
            )
            adapted = PeftModel.from_pretrained(base, str(adapter))
        layer = PEFT_TYPE_TO_PREFIX_MAPPING[
            adapted.active_peft_config.peft_type
        ]  # in the name of each tensor of a layer
        saved = {name for name in load_peft_weights(str(adapter), device="cpu") if layer in name}
    except (RuntimeError, ValueError, OSError) as problem:
        raise CheckpointError(f"{refusal}: {' '.join(str(problem).split())[:300]}") from problem
    put = {name for name in get_peft_model_state_dict(adapted, save_embedding_layers=False) if layer in name}
    if differing := saved ^ put:  # peft only warns, and leaves those layers as they were
        raise CheckpointError(
            f"{refusal}: {len(differing)} of its tensors have no place there or are lacking, as {min(differing)}."
        )
    return adapted


AVERAGE = "average"  # folder of a run

# All that a model folder holds beside its weights, and nothing of a training.
BESIDE_THE_WEIGHTS = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.*",
    "vocab.*",
    "merges.txt",
    "*.py",
    EXTENSION,
)


def export_average(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, run: Path) -> None:
    """Write the mean of the last checkpoints to `average/` in the run's folder, if the recipe asks for it; every
    process must call it.

    Raises:
        CheckpointError: it cannot be written.
    """
    if recipe.checkpoints.average is None:
        return
    folders = complete_checkpoints(run)[-recipe.checkpoints.average :]
    if len(folders) < 2:  # the run is finished and its model written: not worth an error
        tell(f"warning: no average is written: {run} has {len(folders)} checkpoint. Save more often, or train longer.")
        return

    def write() -> None:
        if not is_main_process():
            return
        unfinished = run / f".{AVERAGE}.unfinished"
        try:
            shutil.rmtree(unfinished, ignore_errors=True)
            write_average(folders, unfinished, dtype=None, max_shard_size="5GB")
            tokenizer.save_pretrained(unfinished)
            finish(unfinished)
            carry_extension(recipe.model.path, unfinished)
            rename_over(unfinished, run / AVERAGE)
        except (OSError, SafetensorError) as failure:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise not_exported(run / AVERAGE, failure) from failure
        tell(f"The mean of {', '.join(folder.name for folder in folders)} is in {run / AVERAGE}.")

    main_process_first(write)


def write_average(folders: Sequence[Path], output: Path, *, dtype: torch.dtype | None, max_shard_size: str) -> None:
    """Write the mean of the models' weights, with the last one's config and tokenizer.

    Args:
        dtype: of the written numbers; None: as the last model has them. Sums are made in float64.

    Raises:
        CheckpointError: fewer than two, not models, or of different shapes.
    """
    if len(folders) < 2:
        raise CheckpointError(
            "an average needs two checkpoints or more: cpt merge --method average runs/x/checkpoint-* --output FOLDER"
        )
    models = [open_model(folder) for folder in folders]
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

    write_tensors(
        output,
        {name: (shape, written_dtype(last, name, dtype)) for name, shape in last.shapes.items()},
        mean,
        max_shard_size,
    )
    copy_beside(last.folder, output)


def open_model(folder: Path) -> Tensors:
    """The tensors of a whole model.

    Raises:
        CheckpointError: it is something else.
    """
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder} is no folder (looked in {Path.cwd()}). Give folders of models or of a run's checkpoints."
        )
    match kind_of(folder):
        case "adapter":
            raise CheckpointError(f"{folder} is an adapter. Merge it first: cpt export {folder} --output FOLDER")
        case "zero":
            raise CheckpointError(
                f"{folder} holds ZeRO's parts. Put them together first: cpt export {folder} --output FOLDER"
            )
        case "nothing":
            raise CheckpointError(f"{folder} holds no weights. Give folders of models or of a run's checkpoints.")
    return Tensors(folder)


def refuse_other_shapes(one: Tensors, other: Tensors, apart_from: Sequence[str] = ()) -> None:
    """Weights can be added only where names and shapes are the same.

    Raises:
        CheckpointError: with the first tensors that differ.
    """
    names = sorted(set(one.shapes) ^ set(other.shapes))
    if names:
        holder = one if names[0] in one.shapes else other
        raise CheckpointError(
            f"{one.folder} and {other.folder} are of different architectures: {len(names)} tensors are in one alone, "
            f"as {names[0]} in {holder.folder}. Were they only written differently (an old file, a stored tied head), "
            "write both anew with `cpt export` and merge those."
        )
    for name, shape in one.shapes.items():
        if name not in apart_from and shape != other.shapes[name]:
            raise CheckpointError(
                f"{name} is {list(shape)} in {one.folder} and {list(other.shapes[name])} in {other.folder}: they are"
                " models of different shapes, and their weights cannot be added. Give checkpoints of one run."
            )


def written_dtype(tensors: Tensors, name: str, dtype: torch.dtype | None) -> torch.dtype:
    """Whole numbers and masks stay what they are."""
    stored = tensors.dtypes[name]
    return dtype if dtype is not None and stored.is_floating_point else stored


def copy_beside(folder: Path, output: Path) -> None:
    for pattern in BESIDE_THE_WEIGHTS:
        for file in folder.glob(pattern):
            if file.is_file():
                shutil.copy(file, output / file.name)
