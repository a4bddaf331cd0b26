import json

import pytest

from cpt.errors import CheckpointError
from cpt.exporting.sealed import refuse_unsealed, seal_export


@pytest.fixture
def sealed(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "README.md").write_text("# card")
    seal_export(tmp_path, ["The export loaded back: difference 0.", "Serve it: cpt serve"])
    return tmp_path


def test_an_export_as_it_was_proven_passes_with_what_was_said(sealed):
    assert refuse_unsealed(sealed) == sealed
    assert json.loads((sealed / "export.json").read_text())["proof"] == ["The export loaded back: difference 0."]


def test_the_card_may_be_edited(sealed):
    (sealed / "README.md").write_text("# a better card")
    assert refuse_unsealed(sealed) == sealed


def test_weights_that_changed_since_are_named(sealed):
    (sealed / "model.safetensors").write_bytes(b"Weights")
    with pytest.raises(CheckpointError, match="was changed since it was proven: model.safetensors"):
        refuse_unsealed(sealed)


def test_files_that_came_later_are_named(sealed):
    (sealed / "notes.txt").touch()
    with pytest.raises(CheckpointError, match=r"were not there when it was proven: notes\.txt"):
        refuse_unsealed(sealed)


def test_a_folder_that_nobody_proved_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="is no export that was proven"):
        refuse_unsealed(tmp_path)
