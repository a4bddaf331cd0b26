"""A class is found in the source of a package that is never imported."""

import sys

import pytest

from cpt.errors import ResourceError
from cpt.recipe.huggingface_keys import find_class, parse_module


@pytest.fixture
def lab(tmp_path, monkeypatch):
    """A package whose import would fail, found in the current folder."""
    files = {
        "lab_of_sources/__init__.py": "if TYPE_CHECKING:\n    from .deep import Config as Config\nraise SystemExit\n",
        "lab_of_sources/deep/__init__.py": "from ..other import Real as Config\n",
        "lab_of_sources/other.py": "from . import deep\n\nclass Real: pass\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    for cached in (find_class, parse_module):
        cached.cache_clear()


def test_a_class_is_followed_through_imports(lab):
    source, node = find_class("lab_of_sources", "Config")
    assert node.name == "Real" and source.module == "lab_of_sources.other"
    assert "lab_of_sources" not in sys.modules


def test_a_name_that_is_not_there_is_none(lab):
    assert find_class("lab_of_sources", "Nothing") is None
    assert find_class("lab_of_sources.gone", "Config") is None
    assert find_class("sys", "Config") is None


def test_a_package_that_is_not_installed_is_an_error():
    with pytest.raises(ResourceError, match="pip install not_a_package_at_all"):
        parse_module("not_a_package_at_all.part")


def test_a_module_is_a_file_or_a_folder():
    assert parse_module("json").path.name == "__init__.py" and parse_module("json.decoder").path.name == "decoder.py"
