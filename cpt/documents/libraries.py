"""The libraries that read documents: those of the extra `documents`."""

from importlib.util import find_spec

from cpt.errors import ResourceError

LIBRARIES = {
    "lxml": "lxml",
    "lxml_html_clean": "lxml-html-clean",
    "pypdfium2": "pypdfium2",
    "docx": "python-docx",
    "trafilatura": "trafilatura",
}
"""As they are imported, and as they are called on PyPI."""


def require_libraries() -> None:
    """Stop before anything is imported that needs them.

    Raises:
        ResourceError: with the command that installs them.
    """
    if missing := [name for module, name in LIBRARIES.items() if find_spec(module) is None]:
        raise ResourceError(f"documents are read with {', '.join(missing)}, not installed here. Run: pip install 'cpt[documents]'")
