"""The shipped recipes for one fake GPU: their own shape with few layers of each kind, and rows made by hand."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from cpt.data.readers.columns import form_of_stage
from cpt.hf_internals import IGNORED
from cpt.models.config import config_from
from cpt.optim.adamw import automatic_dtype
from cpt.optim.build import BNB_ADAMW
from cpt.recipe.keys import ACCUMULATION, AUTO, MICRO_BATCH
from cpt.recipe.load import REPOSITORY, load_recipe
from cpt.recipe.rules import OWN_LOSS
from cpt.recipe.schema import LORA_QUANTIZATION, Evaluation, Monitoring, Recipe, Reward

FOLDER = REPOSITORY / "recipes"
PARTS = ("models", "mixtures", "presets", "pipelines", "search")
NUM_LAYERS = ("num_hidden_layers", "n_layer")
HYBRID = "M-*"  # Nemotron-H's names of Mamba, feed-forward and attention layers
TEACHER = "teacher_model_name_or_path"


@dataclass(frozen=True)
class ShippedSetup:
    """What decides which code a step runs on one GPU."""

    family: str
    weights: str
    optimizer: str
    loss: str

    def __str__(self) -> str:
        return ", ".join((self.family, self.weights, self.optimizer, self.loss))


@cache
def shipped_recipes() -> dict[Path, Recipe]:
    # small models first: `distinct_recipes` then has each loss on one of them
    files = sorted(
        FOLDER.rglob("*.yaml"), key=lambda path: (path.parent.name != "tiny", len(path.parts), path)
    )
    # without values there is nothing to compare: labelled runs prove their first batch
    values = ["safety.first_batch_proof=false"]
    paths = [path for path in files if path.relative_to(FOLDER).parts[0] not in PARTS]
    return {path: load_recipe(path, values) for path in paths}


def distinct_recipes() -> Iterator[Path]:
    """Yield few recipes with each family, each loss, and each optimizer of a kind of weights.

    Stages that sample are left to the slow run, which has all recipes.
    """
    parts: dict[Path, set[object]] = {}
    known: set[object] = set()
    for path, recipe in shipped_recipes().items():
        setup = setup_of(recipe)
        of_recipe = {setup.family, setup.loss, (setup.weights, setup.optimizer)}
        if not of_recipe <= known and form_of_stage(recipe.stage) != "prompt":
            known |= of_recipe
            parts[path] = of_recipe
    for path in [*parts]:  # an earlier one has nothing of its own once later ones are in
        others = [of_other for other, of_other in parts.items() if other != path]
        if parts[path] <= set().union(*others):
            del parts[path]
    yield from parts


def different_recipes() -> Iterator[Path]:
    """Yield all recipes that are not the same on one GPU as an earlier one, apart from data and names."""
    known: set[str] = set()
    for path, recipe in shipped_recipes().items():
        small = small_recipe(path, FOLDER)
        parts = [small.model, small.optimizer, small.training, small.stage, small.data.packing]
        steps = repr([weights_of(recipe), small.data.sequence_length, *parts])
        if steps not in known:
            known.add(steps)
            yield path


def setup_of(recipe: Recipe) -> ShippedSetup:
    return ShippedSetup(
        family=str(shape_of(recipe)["model_type"]),
        weights=weights_of(recipe),
        optimizer=recipe.optimizer.name,
        loss="fused loss" if recipe.stage in OWN_LOSS else recipe.stage,
    )


def weights_of(recipe: Recipe) -> str:
    """What the weights are on a GPU: DeepSpeed's are as ours with a master copy, FSDP2's as those in fp32."""
    if recipe.model.lora is not None:
        return "adapters"
    is_half = (
        recipe.model.dtype != "auto"
        or automatic_dtype(recipe, deepspeed=bool(recipe.training.get("deepspeed")), on_gpu=True)
        is torch.bfloat16
    )
    return "half" if is_half else "autocast" if recipe.training.get("bf16") else "fp32"


def shape_of(recipe: Recipe) -> dict[str, Any]:
    """The model's config; for a recipe that continues a run, the config of that run's recipe."""
    if recipe.model.config is not None:
        return dict(recipe.model.config)
    path = Path(str(recipe.model.path))
    name = path.parent.name if path.name == "final" else path.name
    bases = [other for other in shipped_recipes().values() if other.name == name]
    return shape_of(bases[0])


def with_few_layers(written: dict[str, Any], of_a_kind: int) -> dict[str, Any]:
    """Return the config with so many layers of each kind, and nothing else changed."""
    config = config_from(written)
    if "hybrid_override_pattern" in written:
        return {**written, "hybrid_override_pattern": "".join(kind * of_a_kind for kind in HYBRID)}
    if dense := written.get("first_k_dense_replace"):
        return {**written, "num_hidden_layers": dense + of_a_kind}
    number = next(key for key in NUM_LAYERS if key in config.to_dict())
    kinds = dict.fromkeys(getattr(config, "layer_types", None) or ["attention"])
    if len(kinds) == 1:
        return {key: value for key, value in written.items() if key != "layer_types"} | {
            number: of_a_kind
        }
    layers = [kind for kind in kinds for _ in range(of_a_kind)]
    return {**written, number: len(layers), "layer_types": layers}


def small_recipe(path: Path, output_dir: Path, layers_of_a_kind: int = 2) -> Recipe:
    """The recipe from scratch, with few layers and two micro-batches in a step, on one GPU without an engine.

    bitsandbytes has no fake kernels: weights are not quantized, adapters are over half-precision weights, and AdamW
    replaces its optimizers.
    """
    recipe = shipped_recipes()[path]
    config = with_few_layers(shape_of(recipe), layers_of_a_kind)
    lora = recipe.model.lora and {
        key: value for key, value in recipe.model.lora.items() if key not in LORA_QUANTIZATION
    }
    model = {"from_scratch": True, "path": None, "config": config, "parameters": None, "lora": lora}
    if recipe.training.get("deepspeed"):
        model["dtype"] = "bfloat16"  # as DeepSpeed casts it
    elif recipe.training.get("fsdp"):
        model["dtype"] = "float32"  # autocast is then as FSDP2's gathered weights
    micro_batches = 1 if recipe.optimizer.options.get("release_gradients") else 2
    training = {
        **recipe.training,
        ACCUMULATION: micro_batches,
        "logging_steps": 1,
        "deepspeed": None,
        "fsdp": None,
    }
    training["gradient_checkpointing"] = training.get("gradient_checkpointing") in (True, AUTO)
    training["torch_compile"] = False
    if training.get(MICRO_BATCH) == AUTO:
        training[MICRO_BATCH] = 1
    changes = {
        "model": recipe.model.model_copy(update=model),
        "training": {
            key: value
            for key, value in training.items()
            if value is not None and key != "fsdp_config"
        },
        "budget": recipe.budget.model_copy(update={"global_batch_tokens": None}),
        "evaluation": Evaluation(),
        "monitoring": Monitoring(),
        "rewards": [Reward(name="stage_steps:judge_length")] if recipe.rewards else [],
        "output_dir": output_dir,
    }
    if recipe.optimizer.name in BNB_ADAMW:
        changes["optimizer"] = recipe.optimizer.model_copy(update={"name": "adamw"})
    return recipe.model_copy(update=changes)


def rows_of(recipe: Recipe) -> tuple[str, list[dict[str, Any]]]:
    """The form of the stage's data, and rows as long as the recipe's."""
    length, form = recipe.data.sequence_length, form_of_stage(recipe.stage)
    half = [3 + number % 60 for number in range(length // 2)]
    if form == "preference":
        return form, [{"prompt_ids": half, "chosen_ids": half, "rejected_ids": half[::-1]}]
    if form == "unpaired":
        return form, [
            {"prompt_ids": half, "completion_ids": half, "label": good} for good in (True, False)
        ]
    if form == "prompt":
        return form, [
            {"prompt": " ".join(f"w{3 + number % 60}" for number in range(8)), "answer": "w5"}
        ]
    if recipe.data.packing == "token_budget":
        return form, [padded_documents(length)]
    return form, [packed_documents(length)]


def packed_documents(length: int) -> dict[str, torch.Tensor]:
    """Three documents in a row."""
    lengths = [length // 2, length // 3, length - length // 2 - length // 3]
    positions = torch.cat([torch.arange(one) for one in lengths])
    ids = 3 + torch.arange(length) % 60
    return {
        "input_ids": ids,
        "labels": torch.where(positions == 0, IGNORED, ids),
        "position_ids": positions,
    }


def padded_documents(length: int) -> dict[str, torch.Tensor]:
    """Two documents in a batch, the second one shorter."""
    positions = torch.arange(length // 2).tile(2, 1)
    mask = (positions < torch.tensor([[length // 2], [length // 3]])).long()
    ids = 3 + positions % 60
    labels = torch.where((positions == 0) | (mask == 0), IGNORED, ids)
    return {"input_ids": ids, "labels": labels, "position_ids": positions, "attention_mask": mask}
