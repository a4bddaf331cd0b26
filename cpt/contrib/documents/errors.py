"""Why a file was not converted."""


class NotConverted(Exception):  # noqa: N818 -- always caught and written to failed.jsonl
    """A file was not converted: a short reason that many files share, to group by, and details of this file."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail or reason
