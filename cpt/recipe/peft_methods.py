"""The adapter methods of the installed peft by name, with the class of each one's options; read from its sources, like
their keys."""

import ast
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from cpt.errors import RecipeError
from cpt.extend import did_you_mean
from cpt.python_sources import imported_module, last_name, parse_module

LORA = "lora"
OTHERS = "loha, lokr, ia3, oft, boft, vera, fourierft, hra, ln_tuning"
VIRTUAL_TOKENS = (
    "it puts virtual tokens before each row, where rows here hold several documents that positions keep apart; and"
    " what it learns cannot be merged into weights"
)
UNFIT = {
    **dict.fromkeys(
        (
            "prompt_tuning",
            "multitask_prompt_tuning",
            "p_tuning",
            "prefix_tuning",
            "cpt",
            "cartridge",
            "adaption_prompt",
        ),
        VIRTUAL_TOKENS,
    ),
    "adalora": (
        "what it measures of each rank while it trains is in no checkpoint, so a resumed run would be another run"
    ),
    "lily": "what it learns depends on the input, and peft cannot merge it into weights",
    "xlora": "it mixes adapters that are trained already, by the input, and cannot be merged into weights",
    "poly": "it wants the number of a task with each row, which rows here do not have",
    "shadow": "its layers hand on what the head of a causal language model does not read",
}
"""Methods of peft that no run here can train and hand over as one model, and why."""
UNFIT_STARTS = {
    "eva": "it draws the adapter from activations on data, which is done outside of a run",
    "corda": "it draws the adapter from activations on data, which is done outside of a run",
    "lora_ga": "it draws the adapter from gradients on data, which is done outside of a run",
    "loftq": "it changes the weights that lie under the adapter; for a base in 4 bit write `quantize: nf4`",
}
"""Values of `init_lora_weights`."""


def method_of(lora: Mapping[str, Any]) -> str:
    """The method's name as peft's folders have it; lora where none is given."""
    return str(lora.get("method", LORA)).lower()


@lru_cache(maxsize=1)
def peft_methods() -> Mapping[str, str]:
    """Name -> `module:Class` of its options, for each method that peft registers.

    Raises:
        ResourceError: peft is not installed, or its sources cannot be read.
    """
    tuners = parse_module("peft.tuners")
    found: dict[str, str] = {}
    for node in tuners.tree.body if tuners is not None else ():
        if tuners is not None and isinstance(node, ast.ImportFrom):
            found.update(registered_in(imported_module(tuners, node)))
    return found


def registered_in(module: str) -> dict[str, str]:
    """What a module's own calls of `register_peft_method` say."""
    source = parse_module(module)
    found = {}
    for node in ast.walk(source.tree) if source is not None else ():
        if isinstance(node, ast.Call) and last_name(node.func) == "register_peft_method":
            words = {keyword.arg: keyword.value for keyword in node.keywords}
            found[str(ast.literal_eval(words["name"]))] = f"{module}:{last_name(words['config_cls'])}"
    return found


def config_of_method(lora: Mapping[str, Any]) -> str:
    """The class that takes the options.

    Raises:
        RecipeError: peft has no such method, or no run here can train it.
    """
    name = method_of(lora)
    known = peft_methods()
    if name not in known:
        fit = sorted(known.keys() - UNFIT.keys())
        raise RecipeError(
            f"`model.lora.method`: peft has no method called `{name}`.{did_you_mean(name, known)} It has:"
            f" {', '.join(fit)}."
        )
    if name in UNFIT:
        raise RecipeError(
            f"`model.lora.method`: {name} cannot be trained here: {UNFIT[name]}. Take lora, or another: {OTHERS}."
        )
    return known[name]


def takes_4_bit(method: str) -> bool:
    """Whether the method has a layer of its own for weights in 4 bit."""
    module = peft_methods()[method].partition(":")[0]
    source = parse_module(f"{module}.bnb")
    return source is not None and any(
        isinstance(node, ast.ClassDef) and node.name.endswith("Linear4bit") for node in ast.walk(source.tree)
    )
