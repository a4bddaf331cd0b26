import json

import pytest
from tiny import write_recipe

from cpt.errors import RecipeError
from cpt.init.base_model import licence_of, look_at_model, run_that_made
from cpt.models.known_bases import known_base


def test_a_folder_tells_its_size_vocabulary_and_limits(base_folder):
    base = look_at_model(str(base_folder))
    assert (base.vocabulary, base.longest_row, base.hidden, base.layers, base.packs_documents) == (
        320,
        128,
        32,
        2,
        True,
    )
    assert base.parameters == sum(parameter.numel() for parameter in base.model.parameters()) == base.active
    assert base.known is None and base.licence is None


def test_the_licence_is_that_of_the_card_before_that_of_the_table(tmp_path):
    folder = tmp_path / "pythia-410m"
    folder.mkdir()
    table = known_base(str(folder))
    assert table is not None and licence_of(str(folder), table) == ("Apache-2.0", table.source)
    (folder / "README.md").write_text("---\nlanguage: en\nlicense: cc-by-4.0\n---\n# A card\nlicense: none of this\n")
    assert licence_of(str(folder), table) == ("cc-by-4.0", "its card")
    assert licence_of("some/base", None) == (None, "")


def test_a_folder_without_a_tokenizer_is_refused(base_folder, tmp_path):
    (tmp_path / "m").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "m" / name).write_bytes((base_folder / name).read_bytes())
    with pytest.raises(RecipeError, match="tokenizer"):
        look_at_model(str(tmp_path / "m"))


def test_a_base_of_our_own_tells_its_learning_rates_batch_and_rows(tmp_path, tiny_recipe):
    final = tmp_path / "run" / "final"
    final.mkdir(parents=True)
    write_recipe(tiny_recipe, final.parent / "recipe.yaml")
    rows = [{"step": 1, "learning_rate": 1e-3}, {"step": 2, "learning_rate": 1e-4}, {"step": 2, "eval_loss": 3}]
    (final.parent / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = run_that_made(str(final))
    assert made is not None and (made.peak_learning_rate, made.final_learning_rate) == (3e-3, 1e-4)
    assert (made.batch_tokens, made.sequence_length) == (256, 64) and str(final.parent) in made.source
    assert run_that_made(str(final.parent)) is run_that_made("some/base") is None
    assert licence_of(str(final), made) == (None, "")
