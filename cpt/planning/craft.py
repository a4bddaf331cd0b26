"""Settings outside of published bands. Warnings, since the user may know better."""

from collections.abc import Iterator

from cpt.models.known_bases import known_base
from cpt.recipe.rules import reported_name
from cpt.recipe.schema import Recipe

LEAST_LEARNING_RATE, HIGHEST_FOR_ADAMW = 1e-6, 1e-2
LORA_BAND = (1e-5, 5e-4)  # the sweep of arXiv 2405.09673
LARGEST_PEAKS = {1_000_000_000: (3e-3, "SmolLM 135M, huggingface/smollm"), None: (6e-4, "Falcon 7B, its card")}
MOST_WARMUP, STRONG_REPLAY = 0.1, 0.5
REWARMING = "arXiv 2403.08763"
REPLAYED = ("replay", "general")


def craft_warnings(recipe: Recipe, parameters: int | None, max_positions: int | None) -> list[str]:
    """Each setting outside its published band, with the source.

    Args:
        parameters: of the model; None if only the Hub knows it.
        max_positions: the longest row that the model's config names.
    """
    rate, name = recipe.optimizer.learning_rate, recipe.optimizer.name
    if rate > HIGHEST_FOR_ADAMW and "adamw" in name.lower():
        return [f"`optimizer.learning_rate` is {rate:g}: {name} mostly diverges at such rates. 1e-5 to 1e-3 is usual"]
    if recipe.stage != "cpt":
        return []
    rates = [*learning_rate(recipe, parameters), *embedding_learning_rate(recipe)]
    return [*rates, *replay_share(recipe), *warmup(recipe), *rows_and_batch(recipe, max_positions)]


def learning_rate(recipe: Recipe, parameters: int | None) -> Iterator[str]:
    rate, base = recipe.optimizer.learning_rate, known_base(recipe.model.path) if recipe.model.path else None
    key = f"`optimizer.learning_rate` is {rate:g}"
    if recipe.model.lora is not None:
        low, high = LORA_BAND
        if not low <= rate <= high:
            yield f"{key}: LoRA was swept from {low:g} to {high:g}, and did best near the highest (arXiv 2405.09673)"
        return
    if rate < LEAST_LEARNING_RATE:
        yield f"{key}: so small a rate hardly changes the weights; begin near the base's last one ({REWARMING})"
    if base is not None and base.peak_learning_rate is not None:
        if rate > base.peak_learning_rate:
            known = f"{base.peak_learning_rate:g} ({base.source})"
            yield f"{key}, above the peak of the base's own pre-training, {known}: expect forgetting"
    elif parameters is not None:
        limit = next(limit for limit in LARGEST_PEAKS if limit is None or parameters < limit)
        peak, whose = LARGEST_PEAKS[limit]
        if rate > peak:
            yield f"{key}, above the largest peak published for {parameters / 1e9:.2g}B parameters, {peak:g} ({whose})"


def embedding_learning_rate(recipe: Recipe) -> Iterator[str]:
    """Embeddings that are trained along with adapters need a lower rate."""
    lora, optimizer = recipe.model.lora, recipe.optimizer
    rate = optimizer.options.get("embedding_learning_rate")
    if lora is not None and lora.get("preset") == "cpt" and not isinstance(rate, int | float):
        yield (
            "`model.lora: cpt` trains embeddings and head at the adapters' learning rate: 2 to 10 times less is usual."
            f" Write `optimizer.embedding_learning_rate: {optimizer.learning_rate / 10:g}`"
        )
    elif isinstance(rate, int | float) and rate > optimizer.learning_rate:
        yield f"`optimizer.embedding_learning_rate` is {rate:g}: 2 to 10 times below `learning_rate` is usual"


def replay_share(recipe: Recipe) -> Iterator[str]:
    """Some of what the model knows has to be replayed; sources named replay or general count as that."""
    data = recipe.data
    if len(data.sources) == 1:
        yield (
            "`data.sources` replays nothing, and the model will forget: replay 1 to 5 % of general text for a weak"
            f" shift, about 25 % for a strong one, such as another language ({REWARMING}). Pieces to use:"
            " recipes/presets/replay/"
        )
    if data.phases or data.temperature is not None:
        return
    weights = {number: source.weight for number, source in enumerate(data.sources)}
    replayed = [
        weights[number]
        for number, source in enumerate(data.sources)
        if any(word in reported_name(source).lower() for word in REPLAYED)
    ]
    share = sum(replayed) / sum(weights.values())
    if replayed and share < 0.01:
        yield f"`data.sources`: {100 * share:.1f} % is replayed; usual are 1 to 5 %, or 25 % ({REWARMING})"
    elif share > STRONG_REPLAY:
        yield f"`data.sources`: {100 * share:.0f} % is replayed, more than was ever tried (half, {REWARMING})"


def warmup(recipe: Recipe) -> Iterator[str]:
    schedule, total = recipe.schedule, recipe.budget.tokens
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
        key = f"`schedule.{'warmup_share' if share else 'warmup_tokens'}`"
        yield f"{key} is {100 * length / total:.0f} % of the budget: 0.5 to 2 % is usual ({REWARMING})"


def rows_and_batch(recipe: Recipe, longest: int | None) -> Iterator[str]:
    length, tokens = recipe.data.sequence_length, recipe.budget.global_batch_tokens
    if longest is not None and length > longest:
        yield (
            f"`data.sequence_length` is {length:,}, but the model's config names {longest:,} positions. Use the base's"
            " length unless long context is the aim"
        )
    base = known_base(recipe.model.path) if recipe.model.path else None
    if tokens is not None and base is not None and base.batch_tokens is not None and tokens > 2 * base.batch_tokens:
        yield (
            f"`budget.global_batch_tokens` is {tokens:,}, more than twice the base's own {base.batch_tokens:,}"
            f" ({base.source}): smaller steps, and more of them, learn more from as many tokens"
        )
