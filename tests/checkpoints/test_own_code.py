"""A model of the user's own family is read once its module is imported."""

import json
import sys

import pytest

from cpt.checkpoints.own_code import import_own_code, refuse_unknown_code
from cpt.errors import CheckpointError, RecipeError

CONFIG = {"model_type": "lstm_lm", "auto_map": {"AutoConfig": "lstm_language_model.LstmConfig"}}


def test_a_folder_of_a_family_that_nobody_registered_is_refused_with_the_option(tmp_path):
    (tmp_path / "lstm_language_model.py").touch()
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "model_type": "nobodys"}))
    with pytest.raises(CheckpointError, match="--import package.module"):
        refuse_unknown_code(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "model_type": "llama"}))
    refuse_unknown_code(tmp_path)


def test_the_module_that_is_named_is_imported_or_its_absence_told(tmp_path, monkeypatch):
    (tmp_path / "family_of_own_code.py").write_text("NAME = 'my family'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import_own_code(tmp_path, "family_of_own_code")
    assert sys.modules.pop("family_of_own_code").NAME == "my family"
    with pytest.raises(RecipeError, match="cannot import `no_such_family`"):
        import_own_code(tmp_path, "no_such_family")
