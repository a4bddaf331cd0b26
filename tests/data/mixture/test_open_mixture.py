import pytest

from cpt.data.build import open_mixture
from cpt.errors import RecipeError


def test_mistakes_of_a_mixture_file_are_told_with_their_lines(tmp_path, tokenizer):
    (tmp_path / "m.yaml").write_text("sources:\n  - {path: a/b, wieght: 2}\n")
    with pytest.raises(RecipeError, match="m.yaml:2: `data.sources\\[0\\].wieght` is not a key.*`weight`"):
        open_mixture(tmp_path / "m.yaml", tokenizer)
