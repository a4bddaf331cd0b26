"""The models that answer beside each other: a trained one and its base, in memory once where the one is an adapter on
the other."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from peft import PeftModel
from torch import nn
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from cpt.checkpoints.merge_lora import build_base, check_base_weights, is_of_scoring_model, rounded_to
from cpt.checkpoints.own_code import refuse_unknown_code
from cpt.checkpoints.trained import Trained, find_trained, load_whole, tokenizer_of, with_adapter
from cpt.errors import CheckpointError, CptError, RecipeError, ResourceError
from cpt.evaluation.evaluate import positions_of
from cpt.hardware import GIB, host_memory_gib
from cpt.models.build import DTYPES, build_model
from cpt.models.config import load_config
from cpt.models.inventory import count_parameters
from cpt.recipe.schema import Model
from cpt.tokenizer.load import from_folder_or_hub

BEFORE, AFTER = "Base", "Trained"
MORE_THAN_WEIGHTS = (
    1.1  # keys, values and logits of one answer; a tenth is plenty for a model that is worth the question
)


@dataclass(frozen=True)
class Side:
    """One of the models that answer."""

    title: str
    name: str
    """Where its weights lie."""
    model: PreTrainedModel | PeftModel
    tokenizer: PreTrainedTokenizerBase
    positions: int
    """Tokens of the longest text that it was made for."""
    without_adapter: bool = False
    """It is the other side's model with the adapter off."""

    @property
    def has_template(self) -> bool:
        """Whether there is one that tells who speaks; it says nothing of whether the model has learned it."""
        return self.tokenizer.chat_template is not None

    def speaking(self) -> AbstractContextManager[None]:
        """What must hold while it generates."""
        return (
            self.model.disable_adapter()
            if self.without_adapter and isinstance(self.model, PeftModel)
            else nullcontext()
        )


@dataclass(frozen=True)
class Place:
    """A model as it was named: found, and nothing of it read but its config."""

    name: str
    trained: Trained | None
    """None: it is an id of the Hub."""

    @property
    def section(self) -> Model:
        """As a recipe would name it."""
        if self.trained is None:
            return Model(path=self.name)
        if self.trained.is_adapter:
            return self.trained.base
        own = {} if self.trained.recipe is None else {"import_": self.trained.recipe.model.import_}
        return Model(path=str(self.trained.folder)).model_copy(update=own)

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Its own."""
        return from_folder_or_hub(self.name, None, False) if self.trained is None else tokenizer_of(self.trained)


def load_sides(
    model: str, against: str | None = None, *, alone: bool = False, dtype: str = "auto", device: str = "auto"
) -> list[Side]:
    """The base and the trained model, or the one model where there is no base; all is found and counted before any
    weights are read.

    Args:
        model: a run, one of its checkpoints, a model, an adapter, or an id of the Hub.
        against: the same for the other side; by default what the run began with, or what the adapter was trained on.
        alone: leave the other side away.

    Raises:
        CheckpointError: one of them is not there, or not whole.
        ResourceError: they do not fit into the memory that is free.
    """
    target = device_named(device)
    after = place_of(model)
    before = None if alone else place_of(against) if against is not None else base_of(after)
    own, other = after.tokenizer(), None if before is None else before.tokenizer()
    # A vocabulary that grew has rows that the base never saw: then the base is what it was, in memory of its own.
    shared = (
        against is None
        and after.trained is not None
        and after.trained.is_adapter
        and other is not None
        and len(own) == len(other)
    )
    check_memory([after] if before is None or shared else [before, after], dtype, target)
    if before is None or other is None:
        return [loaded(after, AFTER if base_is_known(after) else "Model", own, dtype, target)]
    if shared:
        side = loaded(after, AFTER, own, dtype, target)
        return [Side(BEFORE, before.name, side.model, other, side.positions, without_adapter=True), side]
    return [loaded(before, BEFORE, other, dtype, target), loaded(after, AFTER, own, dtype, target)]


def place_of(name: str) -> Place:
    """The folder, or an id whose config can be read.

    Raises:
        CheckpointError: it is neither.
    """
    path = Path(name).expanduser()
    if path.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1:
        trained = find_trained(path)
        if trained.kind == "adapter" and is_of_scoring_model(trained.folder):
            raise CheckpointError(
                f"{name} is a reward model: it gives scores and writes nothing. Choose a language model."
            )
        refuse_unknown_code(trained.folder)
        return Place(str(trained.folder), trained)
    try:
        load_config(Model(path=name))
    except (RecipeError, ResourceError) as problem:
        raise type(problem)(str(problem).removeprefix("model.path: ")) from problem
    return Place(name, None)


def base_of(after: Place) -> Place | None:
    """What the run began with, or what the adapter was trained on; None where nobody says.

    Raises:
        CheckpointError: it was somewhere else.
    """
    if not base_is_known(after):
        return None
    assert after.trained is not None
    name = str(after.trained.base.path)
    try:
        return place_of(name)
    except CptError as problem:
        raise type(problem)(
            f"the base of {after.name}: {problem} Name it with --against MODEL, or leave it out: --alone"
        ) from problem


def base_is_known(place: Place) -> bool:
    """Whether it was trained from weights, and which ones is on record."""
    if place.trained is None:
        return False
    if place.trained.recipe is None:
        return place.trained.is_adapter
    return not place.trained.recipe.model.from_scratch


def device_named(device: str) -> torch.device:
    """`auto`: the accelerator, where there is one.

    Raises:
        ResourceError: torch knows no such device, or it is not there.
    """
    if device == "auto":
        found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return found or torch.device("cpu")
    try:
        chosen = torch.device(device)
        torch.empty(1, device=chosen)
    except (RuntimeError, AssertionError, ValueError) as problem:
        raise ResourceError(
            f"--device {device}: {str(problem).splitlines()[0]} Use --device auto, or cpu."
        ) from problem
    return chosen


def check_memory(places: list[Place], dtype: str, device: torch.device) -> None:
    """Count the weights by their configs, before any is read.

    Raises:
        ResourceError: with the sizes, and what would make it fit.
    """
    needed = {place.name: size_gib(place, dtype) for place in places}
    free = free_gib(device)
    if sum(needed.values()) * MORE_THAN_WEIGHTS <= free:
        return
    sizes = ", ".join(f"{name} {size:.1f} GiB" for name, size in needed.items())
    remedies = [
        *(["show one model (--alone)"] if len(places) > 1 else []),
        "hold the weights in fewer bytes (--dtype bfloat16)",
    ]
    elsewhere = "a machine with more memory" if device.type == "cpu" else "the host (--device cpu)"
    raise ResourceError(
        f"the weights do not fit into the {free:.1f} GiB that are free on {device}: {sizes}, and a tenth more to"
        f" answer with (counted from their configs). Remedies: {', '.join(remedies)}, {elsewhere}."
    )


def size_gib(place: Place, dtype: str) -> float:
    """Of the weights in memory."""
    config = load_config(place.section)
    return count_parameters(config).total * dtype_of(place, dtype).itemsize / GIB


def dtype_of(place: Place, dtype: str) -> torch.dtype:
    """What the weights will be held in; as they are stored where nothing else was asked for."""
    if dtype != "auto":
        return DTYPES[dtype]
    if place.trained is not None and place.trained.kind == "zero":
        return torch.float32
    stored = load_config(place.section).dtype
    return stored if isinstance(stored, torch.dtype) else torch.float32


def free_gib(device: torch.device) -> float:
    """On the device now."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0] / GIB)
    return min(psutil.virtual_memory().available / GIB, host_memory_gib())  # Apple's GPUs use the host's


def loaded(place: Place, title: str, tokenizer: PreTrainedTokenizerBase, dtype: str, device: torch.device) -> Side:
    """Read it and put it on the device, so that the host holds no more than one at a time."""
    wanted = dtype_of(place, dtype)
    trained = place.trained
    model: PreTrainedModel | PeftModel
    if trained is None:
        built = build_model(place.section, tokenizer, dtype=wanted)
        assert isinstance(built, PreTrainedModel)
        model = built
    elif trained.is_adapter:
        check_base_weights(trained.base_weights, str(trained.base.path), trained.base.revision, trained.folder)
        seed = 42 if trained.recipe is None else trained.recipe.seed
        model = with_adapter(build_base(trained.base, tokenizer, seed=seed, dtype=wanted), trained)
    else:
        whole = load_whole(trained, tokenizer)
        model = whole if whole.dtype == wanted else rounded_to(whole, wanted)
    nn.Module.to(model, device)
    model.eval()
    # What the model's own config adds (sampling, penalties) is the page's to say; where a text ends is the model's.
    written = model.generation_config
    ends = tokenizer.eos_token_id if written is None or written.eos_token_id is None else written.eos_token_id
    model.generation_config = GenerationConfig(eos_token_id=ends, pad_token_id=tokenizer.pad_token_id)
    return Side(title, place.name, model, tokenizer, positions_of(model.config))
