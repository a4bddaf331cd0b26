"""What the literature would say of a recipe that is sound: settings outside published bands. Warnings, since the user
may know better."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from cpt.models.known_bases import KnownBase, known_base
from cpt.recipe.schema import Recipe
from cpt.recipe.sense_data import reported_name

LEAST_LEARNING_RATE, HIGHEST_FOR_ADAMW = 1e-6, 1e-2
LORA_BAND = (1e-5, 5e-4)  # the sweep of arXiv 2405.09673
LARGEST_PEAKS = {1_000_000_000: (3e-3, "SmolLM 135M, huggingface/smollm"), None: (6e-4, "Falcon 7B, its card")}
MOST_WARMUP, STRONG_REPLAY = 0.1, 0.5
REWARMING = "arXiv 2403.08763"
REPLAYED = ("replay", "general")


@dataclass(frozen=True)
class Judged:
    """A recipe and what is known about its model."""

    recipe: Recipe
    parameters: int | None
    max_positions: int | None
    base: KnownBase | None


def craft_warnings(recipe: Recipe, parameters: int | None, max_positions: int | None) -> list[str]:
    """Each setting outside its published band, with the source.

    Args:
        parameters: of the model; None where only the Hub knows it.
        max_positions: the longest row that the model's config names.
    """
    rate, name = recipe.optimizer.learning_rate, recipe.optimizer.name
    if rate > HIGHEST_FOR_ADAMW and "adamw" in name.lower():
        return [
            f"`optimizer.learning_rate` is {rate:g}: {name} diverges at such rates on most models. 1e-5 to 1e-3 is"
            " usual"
        ]
    if recipe.stage != "cpt":
        return []
    judged = Judged(recipe, parameters, max_positions, known_base(recipe.model.path) if recipe.model.path else None)
    return [warning for rule in RULES for warning in rule(judged)]


def learning_rate(judged: Judged) -> Iterator[str]:
    """High enough to learn, not above what pre-training itself used."""
    rate, base = judged.recipe.optimizer.learning_rate, judged.base
    key = f"`optimizer.learning_rate` is {rate:g}"
    if judged.recipe.model.lora is not None:
        low, high = LORA_BAND
        if not low <= rate <= high:
            yield (
                f"{key}: LoRA was swept from {low:g} to {high:g}, and did best near the highest stable one (arXiv"
                " 2405.09673)"
            )
        return
    if rate < LEAST_LEARNING_RATE:
        yield (
            f"{key}: so small a rate moves the weights hardly at all; continuing well begins near the base's last one"
            f" ({REWARMING})"
        )
    if base is not None and base.peak_learning_rate is not None:
        if rate > base.peak_learning_rate:
            yield (
                f"{key}, above the peak of the base's own pre-training, {base.peak_learning_rate:g} ({base.source}):"
                " expect forgetting"
            )
        return
    size = judged.parameters
    if size is not None:
        peak, whose = LARGEST_PEAKS[next((limit for limit in LARGEST_PEAKS if limit is None or size < limit), None)]
        if rate > peak:
            yield (
                f"{key}, above the largest peak published for pre-training at about {size / 1e9:.2g}B parameters,"
                f" {peak:g} ({whose})"
            )


def embedding_learning_rate(judged: Judged) -> Iterator[str]:
    """Embeddings that are trained beside adapters move more slowly than these."""
    lora, optimizer = judged.recipe.model.lora, judged.recipe.optimizer
    rate = optimizer.options.get("embedding_learning_rate")
    if lora is not None and lora.get("preset") == "cpt" and not isinstance(rate, int | float):
        yield (
            "`model.lora: cpt` trains embeddings and head whole, at the adapters' learning rate: 2 to 10 times less"
            f" is usual. Write `optimizer.embedding_learning_rate: {optimizer.learning_rate / 10:g}`"
        )
    elif isinstance(rate, int | float) and rate > optimizer.learning_rate:
        yield (
            f"`optimizer.embedding_learning_rate` is {rate:g}, above the learning rate of all else: 2 to 10 times"
            " below is usual"
        )


def replay_share(judged: Judged) -> Iterator[str]:
    """What the model knows is kept by reading some of it again; sources called replay or general are taken for
    that."""
    data = judged.recipe.data
    if len(data.sources) == 1:
        yield (
            "`data.sources` has nothing that keeps what the model knew: replay 1 to 5 % of general text for a weak"
            f" shift, about 25 % for a strong one, such as another language ({REWARMING}). Pieces to take:"
            " recipes/presets/replay/"
        )
    if data.phases or data.temperature is not None:
        return
    replayed = [
        source.weight for source in data.sources if any(word in reported_name(source).lower() for word in REPLAYED)
    ]
    share = sum(replayed) / sum(source.weight for source in data.sources)
    if replayed and share < 0.01:
        yield (
            f"`data.sources`: {100 * share:.1f} % is replayed; 1 to 5 % do for a weak shift, 25 % for a strong one"
            f" ({REWARMING})"
        )
    elif share > STRONG_REPLAY:
        yield (
            f"`data.sources`: {100 * share:.0f} % is replayed, more than was ever tried (half, {REWARMING}): the"
            " domain gets the rest"
        )


def warmup(judged: Judged) -> Iterator[str]:
    """A short one: its length hardly matters, but a start at full rate is rough."""
    schedule, total = judged.recipe.schedule, judged.recipe.budget.tokens
    share = schedule.options.get("warmup_share")
    length = share * (total or 1) if isinstance(share, float) else schedule.options.get("warmup_tokens", 0)
    if ":" in schedule.name or schedule.name == "continued" or not isinstance(length, int | float):
        return
    if not length:
        yield (
            "`schedule.warmup_tokens` is missing: the first steps at full rate make the loss jump. About 1 % of the"
            f" budget ({REWARMING})"
        )
    elif total is not None and length > MOST_WARMUP * total:
        name = "warmup_share" if share else "warmup_tokens"
        text = f"`schedule.{name}` is {100 * length / total:.0f} % of the budget: the paper warms up over 0.5 to 2 %"
        yield f"{text}, and finds the length to matter little ({REWARMING})"


def sequence_length(judged: Judged) -> Iterator[str]:
    """No longer than the positions that the model has learned."""
    length, longest = judged.recipe.data.sequence_length, judged.max_positions
    if longest is not None and length > longest:
        yield (
            f"`data.sequence_length` is {length:,}, but the model's config names {longest:,} positions: it has learned"
            " none beyond. Keep the base's length unless long context is the aim"
        )


def batch(judged: Judged) -> Iterator[str]:
    """Not larger than the base's own, at the learning rates of which it was stable."""
    tokens, base = judged.recipe.budget.global_batch_tokens, judged.base
    if tokens is not None and base is not None and base.batch_tokens is not None and tokens > 2 * base.batch_tokens:
        text = (
            f"`budget.global_batch_tokens` is {tokens:,}, more than twice the base's own {base.batch_tokens:,}"
            f" ({base.source})"
        )
        yield f"{text}: smaller steps, and more of them, learn more from as many tokens"


RULES: list[Callable[[Judged], Iterator[str]]] = [
    learning_rate,
    embedding_learning_rate,
    replay_share,
    warmup,
    sequence_length,
    batch,
]
