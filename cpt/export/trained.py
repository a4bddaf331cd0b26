"""What was trained, wherever it lies: a run, one of its checkpoints, a model or an adapter; found, and in memory
again."""

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
from cpt.recipe.load import load_recipe
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
        """Whether a base model belongs to it; ZeRO's parts do not tell by themselves."""
        from_lora = self.recipe is not None and self.recipe.model.lora is not None
        return self.kind == "adapter" or (self.kind == "zero" and from_lora)

    @property
    def step(self) -> int | None:
        """Of the run, where it is one of its checkpoints."""
        return step_of(self.folder) if PATTERN.fullmatch(self.folder.name) else None

    @property
    def base(self) -> Model:
        """Of an adapter, as the run had it, or as peft wrote it down; CheckpointError if unknown."""
        if self.stated_base is not None:
            known = Model(path=".") if self.recipe is None else self.recipe.model
            return known.model_copy(update={"path": str(self.stated_base), "revision": None})
        if self.recipe is not None:
            return self.recipe.model
        name = json.loads((self.folder / ADAPTER_CONFIG).read_text()).get("base_model_name_or_path")
        if not name:
            raise CheckpointError(f"{self.folder} names no base. Name it: cpt merge --method lora BASE {self.folder}")
        return Model(path=name)

    @property
    def base_weights(self) -> dict[str, str]:
        """File name -> sha256 of the weights that an adapter was trained on; empty where nobody wrote them down."""
        beside = self.folder / BASE_WEIGHTS
        if beside.is_file():
            return dict(json.loads(beside.read_text())["sha256"])
        return {} if self.run is None else get_dict(read_object(self.run / INPUTS), "weights", "sha256")


def find_trained(path: Path) -> Trained:
    """Of a run its finished model (of LoRA the adapter), else its newest checkpoint. CheckpointError if there is
    nothing, or not all of it."""
    path = path.expanduser()
    if not path.is_dir():
        what = "is a file" if path.exists() else f"does not exist (looked in {Path.cwd()})"
        raise CheckpointError(f"{path} {what}. Give the folder of a run, a checkpoint, a model or an adapter.")
    folder, kind = path, kind_of(path)
    if kind == "nothing" and (path / RECIPE).is_file():
        run = Run(path)
        final = run.export_folder / ADAPTER if (run.export_folder / ADAPTER).is_dir() else run.export_folder
        newest = final if run.is_finished else latest_checkpoint(path)
        if newest is None:
            state = run.status().get("state", "not started")
            why = f"has neither a finished model nor a checkpoint (its state: {state}). Let it run: cpt train RECIPE"
            raise CheckpointError(f"{path} {why}")
        folder, kind = newest, kind_of(newest)
    if kind == "nothing":
        raise CheckpointError(f"{folder} holds no weights: neither a model, nor an adapter, nor DeepSpeed's parts.")
    if PATTERN.fullmatch(folder.name):
        refuse_changed_weights(folder)
    if kind == "model":
        weight_files(folder)
    if kind == "adapter" and not any((folder / name).is_file() for name in ADAPTER_WEIGHTS):
        raise CheckpointError(f"{folder} is incomplete: none of {', '.join(ADAPTER_WEIGHTS)} is there.")
    above = next((parent for parent in (folder.parent, folder.parent.parent) if (parent / RECIPE).is_file()), None)
    recipe = None if above is None else load_recipe(above / RECIPE)
    if recipe is not None and recipe.model.import_ is not None:
        import_user_module(recipe.model.import_)  # so that the model's config can be read
    return Trained(folder, kind, above, recipe)


def import_own_code(folder: Path, module: str | None) -> None:
    """Import what `--import` names, or what the recipe of the folder's run names."""
    if module is None:
        folders = [one for one in (folder, folder.parent) if (one / RECIPE).is_file() and kind_of(one) == "nothing"]
        module = load_recipe(folders[0] / RECIPE).model.import_ if folders else None
    if module is not None:
        import_user_module(module)


def refuse_unknown_code(folder: Path) -> None:
    """CheckpointError if the module of a user's own family was not imported."""
    if brings_its_code(folder) and config_json(folder).get("model_type") not in CONFIG_MAPPING:
        raise CheckpointError(f"{folder} is of a family that transformers does not know. {NAME_IT}")


def tokenizer_of(trained: Trained) -> PreTrainedTokenizerBase:
    """The one beside the weights, else the run's, else the base model's."""
    if any((trained.folder / name).is_file() for name in TOKENIZER_FILES):
        return from_folder_or_hub(str(trained.folder), None, False)
    if trained.recipe is not None:
        return load_tokenizer(trained.recipe.tokenizer, trained.recipe.model)
    if trained.is_adapter:
        return from_folder_or_hub(str(trained.base.path), trained.base.revision, False)
    raise CheckpointError(f"{trained.folder} has no tokenizer. Copy its base model's tokenizer files into it.")


def load_whole(trained: Trained, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """A model that needs no base, in the dtype that it is stored in; of ZeRO's parts in fp32."""
    if trained.kind == "zero":
        empty: PreTrainedModel = AutoModelForCausalLM.from_config(saved_config(trained.folder), dtype=torch.float32)
        load_consolidated(empty, trained.folder)
        if (trained.folder / "generation_config.json").is_file():
            empty.generation_config = GenerationConfig.from_pretrained(trained.folder)
        return empty
    folder = str(trained.folder)
    section = trained.recipe.model if trained.recipe is not None else Model(path=folder)
    update: dict[str, object] = {"lora": None, "hashes": {}, "config": None, "from_scratch": False, "dtype": "auto"}
    update |= {"path": folder, "revision": section.revision if section.trust_remote_code else None}
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
    """The config of a model of transformers or of ours; CheckpointError if there is none."""
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} has no config.json, the shape of its weights. Copy that of the training.")
    register_families()
    return AutoConfig.from_pretrained(folder)


def stored_dtype(folder: Path) -> torch.dtype:
    """Of most of the numbers on the disk."""
    tensors, sizes = Tensors(folder), Counter[torch.dtype]()
    for name, dtype in tensors.dtypes.items():
        sizes[dtype] += torch.Size(tensors.shapes[name]).numel() * dtype.is_floating_point
    return sizes.most_common(1)[0][0]
