import pytest

from cpt.errors import RecipeError
from cpt.init.base_model import licence_of, look_at_model
from cpt.models.known_bases import known_base


def test_a_folder_tells_its_size_vocabulary_and_limits(base_folder):
    base = look_at_model(str(base_folder))
    assert (base.vocabulary, base.longest_row, base.hidden, base.layers, base.packs_documents) == (320, 128, 32, 2, True)
    assert base.parameters == sum(parameter.numel() for parameter in base.model.parameters()) == base.active
    assert base.has_fused_loss and base.known is None and base.licence is None


def test_the_licence_is_that_of_the_card_before_that_of_the_table(tmp_path):
    folder = tmp_path / "pythia-410m"
    folder.mkdir()
    table = known_base(str(folder))
    assert licence_of(str(folder), table) == ("Apache-2.0", "arXiv 2304.01373")
    (folder / "README.md").write_text("---\nlanguage: en\nlicense: cc-by-4.0\n---\n# A card\nlicense: none of this\n")
    assert licence_of(str(folder), table) == ("cc-by-4.0", "its card")
    assert licence_of("some/base", None) == (None, "")


def test_a_folder_without_a_tokenizer_is_refused(base_folder, tmp_path):
    (tmp_path / "m").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "m" / name).write_bytes((base_folder / name).read_bytes())
    with pytest.raises(RecipeError, match="tokenizer"):
        look_at_model(str(tmp_path / "m"))
