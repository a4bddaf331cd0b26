"""What filters and transforms see of a document."""

from collections.abc import Mapping

DocumentView = Mapping[str, str]
"""`text`, `source` (the source's name) and `where` (file and line)."""
