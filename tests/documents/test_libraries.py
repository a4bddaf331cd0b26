import tomllib
from pathlib import Path

import pytest

from cpt.documents import libraries
from cpt.documents.libraries import LIBRARIES, require_libraries
from cpt.errors import ResourceError


def test_what_is_missing_is_said_with_the_command_that_installs_it(monkeypatch):
    require_libraries()
    monkeypatch.setattr(libraries, "LIBRARIES", {**LIBRARIES, "no_such_module": "no-such-package"})
    with pytest.raises(ResourceError, match=r"no-such-package, not installed here. Run: pip install 'cpt\[documents\]'"):
        require_libraries()


def test_the_extra_installs_them():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert {line.partition(">")[0] for line in project["optional-dependencies"]["documents"]} == set(LIBRARIES.values())
