"""Does a model find one sentence in a long text? A number is hidden at several depths, and asked for at the end.

The test is that of arXiv 2305.16300 (a pass key among sentences that say nothing), with keys of their own for each
text, so that no text can be answered from another. The answer counts where each of its tokens is the model's first
choice: what greedy decoding would write.
"""

import gc
import inspect
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cpt.data.store.tokenization import adds_bos
from cpt.errors import RecipeError
from cpt.evaluation.evaluate import known_positions, load
from cpt.evaluation.perplexity import evaluation_mode
from cpt.recipe.schema import Model, Tokenizer
from cpt.tokenizer.load import load_tokenizer

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
TRIALS = 10
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
NEEDLE = "The pass key of {name} is {number}. Remember it. "
QUESTION = "What was the pass key? The pass key of {name} is"
NAMES = ("Ada", "Boris", "Clara", "David", "Elena", "Felix", "Greta", "Henry", "Irene", "Jonas")


@dataclass(frozen=True)
class Text:
    """A text with a needle in it, as ids."""

    ids: list[int]
    answer: int
    """How many of the last ids are the answer."""


@dataclass(frozen=True)
class Found:
    """How often a needle was found."""

    tokens: int
    """Of the text, question and answer included."""
    depth: float
    """Where it lay: 0 at the beginning, 1 right before the question."""
    found: int
    trials: int


def find_needles(model: Model, lengths: Sequence[int], *, trials: int = TRIALS, seed: int = 0) -> list[Found]:
    """Load a model and ask it, at each length and depth; it is gone from memory afterwards.

    Raises:
        RecipeError: a length is more than the model knows, or too short for a needle.
    """
    known = known_positions(model)
    if too_long := [length for length in lengths if length > known]:
        raise RecipeError(
            f"--needle {max(too_long)}: {model.path} knows {known:,} positions. Ask for less, or train more"
            " (`model.rope`)."
        )
    tokenizer = load_tokenizer(Tokenizer(), model)
    loaded = load(model, tokenizer, None)
    found = [
        needles_found(loaded, tokenizer, length, depth, trials=trials, seed=seed)
        for length in lengths
        for depth in DEPTHS
    ]
    del loaded
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return found


def needles_found(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tokens: int, depth: float, *, trials: int, seed: int
) -> Found:
    """At one length and depth."""
    texts = [
        text_with_needle(tokenizer, tokens, depth, random.Random(f"{seed} {tokens} {depth} {trial}"))
        for trial in range(trials)
    ]
    with evaluation_mode(model):
        return Found(tokens, depth, sum(is_answered(model, text) for text in texts), trials)


def text_with_needle(tokenizer: PreTrainedTokenizerBase, tokens: int, depth: float, draw: random.Random) -> Text:
    """Exactly so many tokens; only the filler is cut.

    Raises:
        RecipeError: needle and question alone are longer.
    """
    name, number = draw.choice(NAMES), draw.randrange(10_000, 100_000)

    def ids_of(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    begin = [tokenizer.bos_token_id] if adds_bos(tokenizer) else []
    needle, question = ids_of(NEEDLE.format(name=name, number=number)), ids_of(QUESTION.format(name=name))
    answer = ids_of(f" {number}")
    room = tokens - len(begin) - len(needle) - len(question) - len(answer)
    filler = ids_of(FILLER)
    if room < len(filler):
        raise RecipeError(
            f"--needle {tokens}: needle, question and a little text around them take {tokens - room + len(filler)}"
            " tokens."
        )
    hay = (filler * (room // len(filler) + 1))[:room]
    place = round(depth * room)
    return Text([*begin, *hay[:place], *needle, *hay[place:], *question, *answer], len(answer))


def is_answered(model: PreTrainedModel, text: Text) -> bool:
    """Whether the model would write the answer; only the logits that say it are computed."""
    ids = torch.tensor([text.ids], device=model.device)
    wanted = text.answer + 1
    keeps = {"logits_to_keep": wanted} if "logits_to_keep" in inspect.signature(type(model).forward).parameters else {}
    logits = model(input_ids=ids, use_cache=False, **keeps).logits[0, -wanted:-1]
    return bool((logits.argmax(-1) == ids[0, -text.answer :]).all())
