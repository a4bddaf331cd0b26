"""Find trained weights (a run, one of its checkpoints, a model or an adapter), and load them with tokenizer and
base."""

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import PeftModel
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from cpt.checkpoints.manifest import refuse_changed_weights
from cpt.checkpoints.model_folder import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    Kind,
    Tensors,
    config_json,
    kind_of,
    weight_files,
)
from cpt.checkpoints.resume import PATTERN, latest_checkpoint, step_of
from cpt.checkpoints.sharding import load_consolidated
from cpt.errors import CheckpointError
from cpt.export.export import ADAPTER, BASE_WEIGHTS, load_adapter
from cpt.export.proof import brings_its_code
from cpt.models.adapters import add_lora
from cpt.models.build import build_model
from cpt.models.families import register_families
from cpt.plugins import import_user_module
from cpt.recipe.load import saved_recipe
from cpt.recipe.schema import Model, Recipe
from cpt.runs.folder import INPUTS, RECIPE, get_dict, read_object
from cpt.runs.record import Run
from cpt.tokenizer.load import from_folder_or_hub, load_tokenizer

NAME_IT = "Name the module that registers it: --import package.module"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")


@dataclass(frozen=True)
class Trained:
    folder: Path
    kind: Kind
    run: Path | None
    recipe: Recipe | None
    stated_base: Path | None = None

    @property
    def is_adapter(self) -> bool:
        """Whether the weights need a base model; the parts of a ZeRO checkpoint do not show it."""
        from_lora = self.recipe is not None and self.recipe.model.lora is not None
        return self.kind == "adapter" or (self.kind == "zero" and from_lora)

    @property
    def step(self) -> int | None:
        """The step of a checkpoint of a run, else None."""
        if PATTERN.fullmatch(self.folder.name):
            return step_of(self.folder)
        return None

    @property
    def base(self) -> Model:
        """The base of an adapter, from the run or else from peft's config; CheckpointError if unknown."""
        if self.stated_base is not None:
            section = Model(path=".") if self.recipe is None else self.recipe.model
            return section.model_copy(update={"path": str(self.stated_base), "revision": None})
        if self.recipe is not None:
            return self.recipe.model
        name = json.loads((self.folder / ADAPTER_CONFIG).read_text()).get("base_model_name_or_path")
        if not name:
            raise CheckpointError(
                f"{self.folder} has no base. Name it: cpt merge --method lora BASE {self.folder}"
            )
        return Model(path=name)

    @property
    def base_weights(self) -> dict[str, str]:
        """File name -> sha256 of the weights that an adapter was trained on; empty if not recorded."""
        recorded = self.folder / BASE_WEIGHTS
        if recorded.is_file():
            return dict(json.loads(recorded.read_text())["sha256"])
        if self.run is None:
            return {}
        return get_dict(read_object(self.run / INPUTS), "weights", "sha256")


def find_trained(path: Path) -> Trained:
    """Find the finished model of a run (for LoRA, its adapter), else the newest checkpoint. Raises CheckpointError if
    weights are missing or incomplete."""
    path = path.expanduser()
    if not path.is_dir():
        problem = "is a file" if path.exists() else f"does not exist (looked in {Path.cwd()})"
        raise CheckpointError(
            f"{path} {problem}. Give the folder of a run, a checkpoint, a model or an adapter."
        )
    folder = path
    if kind_of(path) == "nothing" and (path / RECIPE).is_file():
        folder = weights_of_run(Run(path))
    kind = kind_of(folder)
    if kind == "nothing":
        raise CheckpointError(
            f"{folder} has no weights: expected a model, an adapter or a DeepSpeed checkpoint."
        )
    if PATTERN.fullmatch(folder.name):
        refuse_changed_weights(folder)
    if kind == "model":
        weight_files(folder)
    if kind == "adapter" and not any((folder / name).is_file() for name in ADAPTER_WEIGHTS):
        raise CheckpointError(
            f"{folder} is incomplete: expected one of {', '.join(ADAPTER_WEIGHTS)}."
        )
    for parent in (folder.parent, folder.parent.parent):
        if (parent / RECIPE).is_file():
            recipe = saved_recipe(parent)
            if recipe.model.import_ is not None:
                import_user_module(recipe.model.import_)  # needed to read the model's config
            return Trained(folder, kind, parent, recipe)
    return Trained(folder, kind, None, None)


def weights_of_run(run: Run) -> Path:
    """Return a run's finished model (for LoRA, of its adapter), else of its newest checkpoint."""
    if run.is_finished:
        adapter = run.export_folder / ADAPTER
        if adapter.is_dir():
            return adapter
        return run.export_folder
    checkpoint = latest_checkpoint(run.folder)
    if checkpoint is None:
        state = run.status().get("state", "not started")
        raise CheckpointError(
            f"{run.folder} has neither a finished model nor a checkpoint (state: {state})."
            " Continue it: cpt train RECIPE"
        )
    return checkpoint


def import_own_code(folder: Path, module: str | None) -> None:
    """Import the module of `--import`, or the one in the recipe of the folder's run."""
    if module is None:
        for run in (folder, folder.parent):
            if (run / RECIPE).is_file() and kind_of(run) == "nothing":
                module = saved_recipe(run).model.import_
                break
    if module is not None:
        import_user_module(module)


def refuse_unknown_code(folder: Path) -> None:
    """Raise CheckpointError if the module of a user's model family was not imported."""
    if brings_its_code(folder) and config_json(folder).get("model_type") not in CONFIG_MAPPING:
        raise CheckpointError(f"{folder} has a model type unknown to transformers. {NAME_IT}")


def tokenizer_of(trained: Trained) -> PreTrainedTokenizerBase:
    """The tokenizer in the weights' folder, else the run's, else the base model's."""
    if any((trained.folder / name).is_file() for name in TOKENIZER_FILES):
        return from_folder_or_hub(str(trained.folder), None, False)
    if trained.recipe is not None:
        return load_tokenizer(trained.recipe.tokenizer, trained.recipe.model)
    if trained.is_adapter:
        return from_folder_or_hub(str(trained.base.path), trained.base.revision, False)
    raise CheckpointError(
        f"{trained.folder} lacks a tokenizer. Copy its base model's tokenizer files into it."
    )


def load_whole(trained: Trained, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Load a model that needs no base, in its stored dtype; ZeRO checkpoints in fp32."""
    if trained.kind == "zero":
        empty: PreTrainedModel = AutoModelForCausalLM.from_config(
            saved_config(trained.folder), dtype=torch.float32
        )
        load_consolidated(empty, trained.folder)
        if (trained.folder / "generation_config.json").is_file():
            empty.generation_config = GenerationConfig.from_pretrained(trained.folder)
        return empty
    folder = str(trained.folder)
    section = trained.recipe.model if trained.recipe is not None else Model(path=folder)
    update: dict[str, object] = {
        "lora": None,
        "hashes": {},
        "config": None,
        "from_scratch": False,
        "dtype": "auto",
        "path": folder,
        "train_only": None,
        "revision": section.revision if section.trust_remote_code else None,
    }
    section = section.model_copy(update=update)
    model = build_model(section, tokenizer, dtype=stored_dtype(trained.folder))
    assert isinstance(model, PreTrainedModel)
    return model


def with_adapter(base: PreTrainedModel, trained: Trained) -> PeftModel:
    if trained.kind != "zero":
        return load_adapter(base, trained.folder)
    assert trained.recipe is not None and trained.recipe.model.lora is not None
    adapted = add_lora(base, trained.recipe.model.lora)
    load_consolidated(adapted, trained.folder)
    return adapted


def saved_config(folder: Path) -> PreTrainedConfig:
    """The config of a model of transformers or of this package; raises CheckpointError if it is missing."""
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} lacks config.json. Copy it from the training.")
    register_families()
    return AutoConfig.from_pretrained(folder)


def stored_dtype(folder: Path) -> torch.dtype:
    """The dtype of most numbers in the files."""
    tensors = Tensors(folder)
    num_elements = Counter[torch.dtype]()
    for name, dtype in tensors.dtypes.items():
        num_elements[dtype] += torch.Size(tensors.shapes[name]).numel() * dtype.is_floating_point
    return num_elements.most_common(1)[0][0]
