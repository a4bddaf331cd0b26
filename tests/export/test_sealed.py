import json

import pytest

from cpt.errors import CheckpointError
from cpt.export.proof import check_seal, write_seal


@pytest.fixture
def sealed(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "README.md").write_text("# card")
    write_seal(tmp_path, ["The export loaded back: difference 0.", "Serve it: cpt serve"])
    return tmp_path


def test_an_export_as_it_was_proven_passes_and_its_card_may_be_edited(sealed):
    (sealed / "README.md").write_text("# a better card")
    assert check_seal(sealed) == sealed
    assert json.loads((sealed / "export.json").read_text())["proof"] == ["The export loaded back: difference 0."]


@pytest.mark.parametrize("changed", ["model.safetensors", "notes.txt"])
def test_files_that_changed_or_came_later_are_named(sealed, changed):
    (sealed / changed).write_bytes(b"other")
    with pytest.raises(CheckpointError, match=changed):
        check_seal(sealed)
