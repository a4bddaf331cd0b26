import sys

import pytest

from cpt.errors import ResourceError
from cpt.search.library import optuna


def test_without_optuna_the_install_line_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ResourceError, match=r"pip install 'cpt\[search\]'"):
        optuna()
