"""Mask personal data that is written in a usual way: e-mail addresses, card numbers, IP addresses, phone numbers.

    data:
      transforms: [{name: "examples.transforms.personal_data:mask", kinds: [email, phone]}]

Copy this file and change it to what your documents need. Names of people are not found.
"""

import ipaddress
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

Kind = Literal["email", "card", "ip", "phone"]
Document = Mapping[str, str]


def mask(
    document: Document,
    *,
    kinds: Sequence[Kind] = ("email", "card", "ip", "phone"),
    by: str = "<{kind}>",
) -> Document:
    """Put `<email>`, `<card>`, `<ip>`, `<phone>` in the place of each.

    Args:
        by: what to put there, `{kind}` being the kind.
    """
    text = document["text"]
    for kind, (
        candidate,
        is_real,
    ) in PATTERNS.items():  # in our order: the digits of a card look like a phone number
        if kind in kinds:
            replacement = by.replace("{kind}", kind)
            text = candidate.sub(
                lambda match, is_real=is_real, new=replacement: (
                    new if is_real(match[0]) else match[0]
                ),  # type: ignore[misc]
                text,
            )
    return {**document, "text": text}


def always(_: str) -> bool:
    """The pattern says it all."""
    return True


def is_card(candidate: str) -> bool:
    """True for 13 to 19 digits that end with the right check digit (Luhn, ISO/IEC 7812-1) and begin as cards do."""
    digits = [int(character) for character in candidate if character.isdigit()]
    doubled = [
        digit if place % 2 == 0 else (digit * 2 - 9 if digit > 4 else digit * 2)
        for place, digit in enumerate(reversed(digits))
    ]
    return digits[0] in range(2, 7) and sum(doubled) % 10 == 0


def is_public_address(candidate: str) -> bool:
    """True for an address that belongs to somebody: not 127.0.0.1 or 192.168.0.1, and of IPv6 only what is given out
    (2000::/3)."""
    try:
        address = ipaddress.ip_address(candidate)
    except ValueError:
        return False
    return address.is_global and (
        address.version == 4 or address in ipaddress.ip_network("2000::/3")
    )


# Every repeat has a limit: a document may be one line of 50 MB.
PATTERNS: dict[Kind, tuple[re.Pattern[str], Callable[[str], bool]]] = {
    "email": (
        re.compile(r"(?<![\w.+%-])[\w.+%-]{1,64}@(?:[A-Za-z0-9-]{1,63}\.){1,8}[A-Za-z]{2,24}\b"),
        always,
    ),
    "card": (re.compile(r"(?<![\w.-])\d(?:[ -]?\d){12,18}(?![\w-])", re.ASCII), is_card),
    "ip": (
        re.compile(
            r"(?<![\w.:])(?:\d{1,3}(?:\.\d{1,3}){3}(?!\.?\w)|(?:[0-9A-Fa-f]{0,4}:){2,7}[0-9A-Fa-f]{0,4}(?![\w:]))",
            re.ASCII,
        ),
        is_public_address,
    ),
    "phone": (
        re.compile(
            r"(?<![\w.+-])(?:\+\d{1,3}[ .-]?(?:\(\d{1,4}\)[ .-]?)?\d{1,4}(?:[ .-]?\d{2,4}){2,4}"  # +44 20 7946 0958
            r"|(?:\(\d{3}\) ?|\d{3}[ .-])\d{3}[ .-]\d{4})(?![\w-])",  # (212) 555-0123
            re.ASCII,
        ),
        always,
    ),
}
