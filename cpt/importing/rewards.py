"""Stages that learn from rewards: axolotl's section `trl`, with its reward functions."""

from collections.abc import Mapping
from typing import Any

from cpt.importing.ledger import EMPTY, Ledger
from cpt.importing.passing import pass_on

RENAMED = {"vllm_max_model_len": "vllm_max_model_length", "vllm_guided_decoding_regex": "vllm_structured_outputs_regex"}
"""Keys of `trl` whose names in TRL are others by now."""


def write_rewards(ledger: Ledger, stage: str) -> None:
    """`rewards`, and what of the section TRL's own config takes."""
    given = ledger.value("trl")
    ledger.skip_empty(["trl"])
    if not isinstance(given, Mapping) or not given:
        ledger.enter("trl", "carried", EMPTY)
        functions: list[Any] = []
    else:
        functions = list(given.get("reward_funcs") or [])
        weights = list(given.get("reward_weights") or [])
        write_functions(ledger, functions, weights, stage)
        for key, value in given.items():
            if value is None:
                ledger.enter(f"trl.{key}", "carried", EMPTY)
            elif key not in ("reward_funcs", "reward_weights"):
                pass_on(ledger, f"trl.{key}", RENAMED.get(str(key), str(key)), value)
    if stage == "grpo" and not functions:
        ledger.put("rewards", ["exact_match"], "FILL IN: what an answer is worth (docs/stages.md)")


def write_functions(ledger: Ledger, functions: list[Any], weights: list[Any], stage: str) -> None:
    """`module.function` there is `module:function` here."""
    if stage == "grpo" and functions:
        names = [":".join(str(name).rsplit(".", 1)) for name in functions]
        values = [*weights, *([1.0] * (len(names) - len(weights)))]
        ledger.put("rewards", [{"name": name, "weight": float(weight)} for name, weight in zip(names, values, strict=False)])
        ledger.otherwise("trl.reward_funcs", "rewards, as module:function; name the columns it reads as parameters (docs/stages.md)")
        ledger.enter("trl.reward_weights", "carried", "rewards[].weight")
    for key in ("reward_funcs", "reward_weights"):
        ledger.drop(f"trl.{key}", f"stage `{stage}` learns from no rewards")
