"""How the tables of keys are written: one reason for many keys, keys that keep their names."""

from collections.abc import Mapping


def by_key(groups: Mapping[str, str]) -> dict[str, str]:
    """Key -> reason.

    Args:
        groups: reason -> the keys that it is for, with blanks between them.
    """
    return {key: reason for reason, keys in groups.items() for key in keys.split()}


def as_they_are(keys: str) -> dict[str, str]:
    """Key -> the same name.

    Args:
        keys: with blanks between them.
    """
    return {key: key for key in keys.split()}
