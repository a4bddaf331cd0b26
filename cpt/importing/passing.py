"""Hugging Face's own keys, which go into `training:` unchanged where the installed version has them and they do
something here."""

from typing import Any

from cpt.importing.ledger import Ledger, truth
from cpt.recipe.huggingface_keys import STAGE_CONFIGS, Key, keys_of_config
from cpt.recipe.moved_keys import MOVED, NO_EFFECT, NO_EFFECT_ON_EXAMPLES, REMOVED
from cpt.recipe.words import KINDS, fits, kind_of


def pass_on(ledger: Ledger, key: str, name: str | None = None, value: Any = None) -> None:
    """Write a key into `training:`, or say why that would be of no use.

    Args:
        name: how Hugging Face calls it, where that is another name.
        value: instead of the config's.
    """
    name = name or key
    found = ledger.value(key) if value is None else value
    if found is None:
        ledger.skip_empty([key])
        return
    stage = str(ledger.recipe.get("stage", "cpt"))
    known = keys_of_config(STAGE_CONFIGS[stage])
    reason = NO_EFFECT.get(name) or NO_EFFECT_ON_EXAMPLES.get(name)
    if reason or name in REMOVED and name not in known:
        ledger.otherwise(key, reason or f"gone from transformers: {REMOVED[name]}")
    elif name in MOVED or name not in known:
        ledger.drop(key, f"stage `{stage}` has no such key in `training:` ({STAGE_CONFIGS[stage].partition(':')[2]})")
    elif (fitting := fitted(found, known[name])) is None:
        ledger.drop(key, f"`training.{name}` must be {kinds_in_words(known[name])}")
    else:
        ledger.put(f"training.{name}", fitting, key if key != name else "")
        ledger.enter(key, "carried", f"training.{name}")


def fitted(value: Any, key: Key) -> Any:
    """The value as the class takes it: numbers and switches out of texts; None where it cannot be."""
    if isinstance(value, str) and "str" not in key.kinds:
        if "bool" in key.kinds and value.lower() in ("true", "false", "yes", "no", "on", "off"):
            return truth(value)
        try:
            value = float(value)
        except ValueError:
            return None
    if kind_of(value) == "float" and "float" not in key.kinds and "int" in key.kinds and float(value).is_integer():
        return int(value)
    if isinstance(value, str) and key.enums and value not in key.choices():
        return None
    return value if fits(value, key.kinds) else None


def kinds_in_words(key: Key) -> str:
    """`a number or text`."""
    return " or ".join(sorted(KINDS[kind] for kind in key.kinds - {"null"}))
