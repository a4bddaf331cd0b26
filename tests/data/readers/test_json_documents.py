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
