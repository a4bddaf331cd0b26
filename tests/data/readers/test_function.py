import pytest

from cpt.errors import RecipeError


@pytest.fixture(autouse=True)
def lab(tmp_path, monkeypatch):
    (tmp_path / "my_lab_sources.py").write_text(
        "def dump(*, count: int = 1):\n"
        "    for number in range(count):\n"
        "        yield str(number) if number % 2 else {'text': 'row', 'n': number}\n"
        "def mixed():\n    return ['one', 7, {'body': 'x'}, 'a\\ud800', None, {'text': None}, 'a\\0']\n"
        "def nothing():\n    return None\n"
    )
    monkeypatch.syspath_prepend(tmp_path)


def test_options_are_checked_and_something_must_come(read):
    with pytest.raises(RecipeError, match=r"`k.options.cuont` is not an option of dump. Did you mean `count`"):
        read("my_lab_sources:dump", options={"cuont": 3})
    with pytest.raises(RecipeError, match="returned null, expected a list or generator"):
        read("my_lab_sources:nothing")
    with pytest.raises(RecipeError, match="cannot import `no_such_lab`"):
        read("no_such_lab:dump")
