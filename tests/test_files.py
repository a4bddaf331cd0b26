from contextlib import suppress

import pytest
from tiny_run import DAMAGES, damage

from cpt.files import read_sealed, sealed, unsealed

CONTENT = {"lengths": {4: 2}, "longest": ("a", 1), "share": 0.1, "name": "ü"}


def test_sealed_content_comes_back_as_json():
    assert unsealed(sealed(CONTENT)) == {"lengths": {"4": 2}, "longest": ["a", 1], "share": 0.1, "name": "ü"}


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_file_counts_as_missing_and_is_logged(tmp_path, caplog, how):
    path = tmp_path / "file.json"
    path.write_text(sealed(CONTENT))
    damage(path, how)
    assert read_sealed(path) is None
    assert [vars(record)["event"] for record in caplog.records] == ["damaged_file"] * (how != "missing")


def test_no_flipped_bit_changes_the_content_unnoticed():
    text = bytearray(sealed(CONTENT).encode())
    for place in range(8 * len(text)):
        flipped = text.copy()
        flipped[place // 8] ^= 1 << place % 8
        with suppress(ValueError):
            assert unsealed(bytes(flipped)) == unsealed(bytes(text)), "\\u00fC is the letter that \\u00fc is"
