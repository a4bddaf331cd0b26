import pytest


@pytest.mark.parametrize(
    "content, expected",
    [
        ('[{"text": "one"}, {"text": "two"}]', ["one", "two"]),
        ('{\n "text": "one"\n}\n', ["one"]),
        ('{"text": "one"}\n{"text": "two"}\n', ["one", "two"]),
    ],
    ids=["a list", "one object", "jsonl in disguise"],
)
def test_json_of_any_shape_is_read(tmp_path, texts, content, expected):
    (tmp_path / "a.json").write_text(content)
    assert texts(tmp_path / "a.json") == expected


@pytest.mark.parametrize(
    "content, reason, byte",
    [
        (b'[{"text": "one"},', "cut off", 17),
        (b'[{"text": x}]', "not valid JSON", 10),
        (b'[{"text": "\xff"}]', "invalid UTF-8", 11),
        (b"[]", "no rows", None),
    ],
)
def test_a_broken_file_is_one_bad_row_with_the_byte(tmp_path, bad, content, reason, byte):
    (tmp_path / "a.json").write_bytes(content)
    assert (bad(tmp_path / "a.json").reason, bad(tmp_path / "a.json").byte) == (reason, byte)
