import pytest

from cpt.data.build import open_mixture
from cpt.errors import RecipeError


@pytest.fixture
def mixture_file(source, tmp_path):
    paths = [source(name, [f"{name} {number}" for number in range(50)]).path for name in ("a", "b")]
    sources = "".join(
        f"  - {{path: {path}, weight: {weight}}}\n" for path, weight in zip(paths, (0.75, 0.25), strict=True)
    )
    (tmp_path / "mixture.yaml").write_text(f"total_tokens: 5_000\nsequence_length: 16\nsources:\n{sources}")
    return tmp_path / "mixture.yaml"


def test_a_recipe_gives_its_own_rows(mixture_file, tokenizer, tmp_path):
    (tmp_path / "r.yaml").write_text(
        "name: r\nseed: 7\nmodel: {path: a/b}\nbudget: {tokens: 64}\ndata: {base: mixture.yaml, total_tokens: null}\n"
    )
    rows = open_mixture(tmp_path / "r.yaml", tokenizer, ["data.sequence_length=32"], cache_dir=tmp_path)
    assert rows.seed == 7 and len(rows[0]["input_ids"]) == 32
    assert sum(rows.source_of(number) == 0 for number in range(400)) == 300


def test_mistakes_of_a_mixture_file_are_told_with_their_lines(tmp_path, tokenizer):
    (tmp_path / "m.yaml").write_text("sources:\n  - {path: a/b, wieght: 2}\n")
    with pytest.raises(RecipeError, match="m.yaml:2: `data.sources\\[0\\].wieght` is not a key.*`weight`"):
        open_mixture(tmp_path / "m.yaml", tokenizer)
