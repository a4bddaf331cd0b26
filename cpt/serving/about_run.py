"""What a run's folder gives to try its model with: its verdict's headline, and beginnings of documents that it never
trained on."""

import random
from itertools import islice
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from cpt.errors import CptError
from cpt.evaluation.judged_sets import judges_of_recipe, open_judged_sets
from cpt.recipe.load import load_recipe
from cpt.recipe.schema import Recipe
from cpt.runs.folder import RECIPE, VERDICT, read_object

LONGEST, SHORTEST = 160, 24
"""Characters of a beginning."""
FIRST_DOCUMENTS = 200


def headline_of(run: Path) -> str:
    """Of the verdict, or how to come by one."""
    headline = read_object(run / VERDICT, []).get("headline")
    return f"No verdict on this run yet: cpt verdict {run}" if headline is None else str(headline)


def beginnings_of(run: Path, tokenizer: PreTrainedTokenizerBase, count: int = 4) -> list[str]:
    """Of the run's own held-out domain text, the same ones each time; where it is not here any more, the recipe's
    prompts."""
    recipe = load_recipe(run / RECIPE)
    try:
        found = held_out_beginnings(recipe, tokenizer)
    except (CptError, OSError):  # the documents may have stayed where the run was
        found = []
    chosen = random.Random(0).sample(found, min(count, len(found)))
    return chosen or list(recipe.evaluation.prompts)[:count]


def held_out_beginnings(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Of the first documents of each set that is not there to be retained."""
    sets = open_judged_sets(judges_of_recipe(recipe), tokenizer)
    domain = [one for name, one in sets.items() if name not in recipe.evaluation.retain]
    texts = (document.text for one in domain for document in islice(one.texts(), FIRST_DOCUMENTS))
    return list(dict.fromkeys(begun for text in texts if (begun := beginning(text)) is not None))


def beginning(text: str) -> str | None:
    """The first words, whole: up to the end of a line where there is one, else of a word; None where the document is
    too short."""
    text = text.lstrip()
    if len(text) < SHORTEST + LONGEST:
        return None
    part = text[:LONGEST]
    for mark in ("\n", " "):
        if part.rfind(mark) >= SHORTEST:
            return part[: part.rfind(mark)]
    return part
