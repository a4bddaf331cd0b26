"""Stages that learn from rewards: axolotl's section `trl`, with its reward functions."""

from typing import Any

from cpt.importing.ledger import EMPTY, Ledger
from cpt.importing.passing import pass_on

RENAMED = {
    "vllm_max_model_len": "vllm_max_model_length",
    "vllm_guided_decoding_regex": "vllm_structured_outputs_regex",
}
"""Keys of `trl` whose names in TRL are others by now."""
SCALED = {True: "group", False: "none"}
"""`scale_rewards`, which was a switch."""


def write_rewards(ledger: Ledger, stage: str) -> None:
    """`rewards`, and what of the section TRL's own config takes."""
    given = ledger.section("trl")
    ledger.skip_empty(["trl"])
    if not given:
        ledger.enter("trl", "carried", EMPTY)
    functions = in_list(given.get("reward_funcs"))
    weights = [ledger.as_number("trl.reward_weights", weight) for weight in in_list(given.get("reward_weights"))]
    write_functions(ledger, functions, weights, stage)
    for key, value in given.items():
        if value is None:
            ledger.enter(f"trl.{key}", "carried", EMPTY)
        elif key not in ("reward_funcs", "reward_weights"):
            pass_on(
                ledger,
                f"trl.{key}",
                RENAMED.get(key, key),
                SCALED.get(value, value) if key == "scale_rewards" else value,
            )
    if stage == "grpo" and not functions:
        ledger.put("rewards", ["exact_match"], "FILL IN: what an answer is worth (docs/stages.md)")


def in_list(value: Any) -> list[Any]:
    """One value, or several."""
    return value if isinstance(value, list) else [] if value is None else [value]


def write_functions(ledger: Ledger, functions: list[Any], weights: list[float], stage: str) -> None:
    """`module.function` there is `module:function` here."""
    if stage == "grpo" and functions:
        names = [":".join(str(name).rsplit(".", 1)) for name in functions]
        values = [*weights, *([1.0] * (len(names) - len(weights)))]
        ledger.put("rewards", [{"name": name, "weight": weight} for name, weight in zip(names, values, strict=False)])
        ledger.otherwise(
            "trl.reward_funcs", "rewards, as module:function; name the columns it reads as parameters (docs/stages.md)"
        )
        ledger.enter("trl.reward_weights", "carried", "rewards[].weight")
    for key in ("reward_funcs", "reward_weights"):
        ledger.drop(f"trl.{key}", f"stage `{stage}` learns from no rewards")
