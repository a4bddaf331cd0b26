"""The part of a page that a command writes, between two markers."""


def with_part(text: str, begin: str, end: str, part: str, page: str) -> str:
    """The text with its part between the markers made anew.

    Args:
        page: its name, for whoever has lost a marker.
    """
    before, _, rest = text.partition(begin)
    _, marker, after = rest.partition(end)
    if not marker:
        raise SystemExit(f"{page} has no lines {begin.strip()} and {end.strip()}")
    return f"{before}{begin}{part}{end}{after}"
