"""Put values in the place of @NAMES@ in a script; bash's own braces and dollars stay as they are."""

import re

NAME = re.compile(r"@([A-Z_]+)@")


def filled(text: str, **values: object) -> str:
    """The text with each @NAME@ replaced by the value of that name in small letters."""
    return NAME.sub(lambda found: str(values[found.group(1).lower()]), text.lstrip("\n"))
