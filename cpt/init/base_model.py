"""What is known about the base model: its config and tokenizer, its card, and what was published about its
training."""

import re
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cpt.errors import RecipeError
from cpt.models.config import load_config
from cpt.models.inventory import (
    build_on_meta,
    count_model_parameters,
    isolates_documents,
    longest_row,
    vocabulary_size,
)
from cpt.models.known_bases import KnownBase, known_base
from cpt.recipe.load import load_recipe
from cpt.recipe.paths import is_local
from cpt.recipe.run_results import result_of_run
from cpt.recipe.schema import Model, Tokenizer
from cpt.runs.folder import EXPORT, METRICS, RECIPE, read_objects
from cpt.tokenizer.load import load_tokenizer

CARD_LICENCE = re.compile(r"^license:\s*[\"']?([\w.-]+)", re.MULTILINE)


@dataclass(frozen=True)
class BaseModel:
    """A model that training starts from, without its weights."""

    path: str
    model: PreTrainedModel
    """On the meta device."""
    tokenizer: PreTrainedTokenizerBase
    parameters: int
    active: int
    vocabulary: int
    longest_row: int | None
    packs_documents: bool
    known: KnownBase | None
    licence: str | None
    licence_source: str

    @property
    def hidden(self) -> int:
        """Width."""
        return int(self.model.config.get_text_config().hidden_size)

    @property
    def layers(self) -> int:
        """Depth."""
        return int(self.model.config.get_text_config().num_hidden_layers)


def look_at_model(path: str) -> BaseModel:
    """Read what can be known without opening any weights.

    Raises:
        RecipeError: it cannot be loaded, or its tokenizer does not belong to it.
        ResourceError: it is on the Hub, which cannot be reached or wants a login.
    """
    path = result_of_run(path) or path
    section = Model(path=path)
    config = load_config(section)
    tokenizer = load_tokenizer(Tokenizer(), section)
    known_tokens = vocabulary_size(config)
    if len(tokenizer) > known_tokens:
        raise RecipeError(
            f"{path}: its tokenizer has {len(tokenizer):,} tokens, its model an embedding for {known_tokens:,}: they"
            " do not belong together. Put the base's own tokenizer.json and tokenizer_config.json there; to add words"
            " of your own: cpt tokenizer extend."
        )
    model = build_on_meta(config)
    count = count_model_parameters(model)
    base = run_that_made(path) or known_base(path)
    licence, source = licence_of(path, base)
    return BaseModel(
        path,
        model,
        tokenizer,
        count.total,
        count.active,
        known_tokens,
        longest_row(config),
        isolates_documents(config),
        base,
        licence,
        source,
    )


def licence_of(path: str, base: KnownBase | None) -> tuple[str | None, str]:
    """What the model is under, and who says so: the card in its folder, or what was published."""
    card = Path(path).expanduser() / "README.md"
    if (
        is_local(path)
        and card.is_file()
        and (found := CARD_LICENCE.search(card.read_text(errors="replace").split("\n---", 1)[0]))
    ):
        return found[1], "its card"
    return (base.licence, base.source) if base and base.licence else (None, "")


def run_that_made(path: str) -> KnownBase | None:
    """How a run of ours trained the model that it left in this folder."""
    run = Path(path).expanduser().parent
    metrics, recipe = run / METRICS, run / RECIPE
    if not is_local(path) or Path(path).name != EXPORT or not metrics.is_file() or not recipe.is_file():
        return None
    rates = [row["learning_rate"] for row in read_objects(metrics, []) if "learning_rate" in row]
    made, last = load_recipe(recipe), float(rates[-1]) if rates else None
    peak, batch = made.optimizer.learning_rate, made.budget.global_batch_tokens
    return KnownBase(path, "", f"the run that made it, {run}", peak, last, batch, made.data.sequence_length)
