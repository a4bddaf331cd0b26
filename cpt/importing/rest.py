"""The keys of a config that no part of the recipe was made of: passed on, idle, not here, or unknown."""

from collections.abc import Collection, Mapping

from cpt.extend import did_you_mean
from cpt.importing.ledger import EMPTY, OFF, Ledger
from cpt.importing.passing import pass_on


def enter_the_rest(
    ledger: Ledger,
    *,
    handled: Collection[str],
    passed: Mapping[str, str],
    idle: Mapping[str, str],
    dropped: Mapping[str, str],
    known: Collection[str],
    trainers: Collection[str] = (),
) -> None:
    """Enter every key that is open.

    Args:
        handled: keys that a recipe has something for.
        passed: key -> Hugging Face's name of it.
        idle: key -> why nothing has to be said.
        dropped: key -> why not, and what to do.
        trainers: keys of Hugging Face's that the tool takes too.
    """
    for key in ledger.open_keys():
        value = ledger.value(key)
        if value is None:
            ledger.enter(key, "carried", EMPTY)
        elif key in passed:
            pass_on(ledger, key, passed[key])
        elif key in idle:
            ledger.otherwise(key, idle[key])
        elif key in dropped:
            if value in (False, 0, "", [], {}):
                ledger.enter(key, "carried", OFF)
            ledger.drop(key, dropped[key])
        elif key in handled:
            ledger.enter(key, "carried", OFF)
        elif key in trainers:
            pass_on(ledger, key)
        else:
            ledger.drop(key, f"{ledger.called} has no such key, as far as cpt knows.{did_you_mean(key, known)}")
