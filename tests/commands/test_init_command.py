"""Documents and a model in, a recipe out that `cpt check` passes."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from approved import check_approved
from tiny_checkpoints import save_llama

from cpt.commands import init
from cpt.data.readers.shared_lines import shared_line_warnings
from cpt.errors import CptError, DataError, RecipeError, ResourceError
from cpt.planning import init_recipe
from cpt.planning.gate import check_reality
from cpt.recipe.load import load_recipe


@pytest.fixture(scope="session")
def base_folder(tokenizer_folder, tmp_path_factory) -> Path:
    return save_llama(tmp_path_factory.mktemp("models") / "tiny-base", tokenizer_folder, seed=0)


@pytest.fixture
def run(tmp_path, monkeypatch, base_folder, corpus):
    """`cpt init`, with what a test changes, in a folder that has documents and a model."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base").symlink_to(base_folder)
    for name in ("domain", "general"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.jsonl").write_bytes((corpus / f"{name}.jsonl").read_bytes())

    def init_with(**options):
        chosen = {
            "documents": "domain",
            "model": "./base",
            "gpu": "cpu",
            "general": "./general",
            **options,
        }
        init.command(**chosen)
        return load_recipe(chosen.get("output", "recipe.yaml"))

    return init_with


def test_init_warns_of_text_that_the_base_does_not_give_back(run, tmp_path, capsys):
    rows = [{"text": f"A text {number} of the fox<|endoftext|>"} for number in range(120)]
    (tmp_path / "domain" / "domain.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows)
    )
    run()
    assert "x `<|endoftext|>`" in capsys.readouterr().out


@pytest.mark.heavy
def test_the_recipe_is_as_approved(run):
    run(gpu="RTX 4090", gpus=4, host_memory=64.0, price_per_gpu_hour=2.0)
    check_approved(
        Path("recipe.yaml").read_text(), Path(__file__).with_name("approved_recipe.yaml")
    )


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("gpu", "gpus"),
    [
        ("cpu", 1),
        pytest.param("RTX 4090", 1, marks=pytest.mark.slow),
        pytest.param("A100-80GB", 4, marks=pytest.mark.slow),
    ],
)
def test_the_recipe_has_no_mistakes_and_no_warnings(run, gpu, gpus):
    found = check_reality(run(gpu=gpu, gpus=gpus))
    assert found.mistakes == found.warnings == [], found


@pytest.mark.slow
@pytest.mark.parametrize(("gpu", "gpus"), [("RTX 4090", 1), ("RTX 4090", 3), ("A100-80GB", 6)])
def test_the_recipe_for_a_large_base_has_no_mistakes(run, gpu, gpus):
    shutil.copytree("base", "large", ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads(Path("large/config.json").read_text())
    shape = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    Path("large/config.json").write_text(json.dumps(config | shape | heads))
    recipe = run(model="./large", gpu=gpu, gpus=gpus, host_memory=128.0)
    mistakes = list(map(str, check_reality(recipe).mistakes))
    assert all("large" in mistake for mistake in mistakes), mistakes  # it has no weights


@pytest.mark.slow
def test_without_a_general_set_the_public_one_is_replayed_and_with_none_nothing_is(run):
    recipe = run(general=None, gpu="RTX 4090")
    assert (
        recipe.data.sources[1].path == init.PUBLIC_GENERAL and recipe.data.sources[1].max_documents
    )
    recipe = run(general="none", output=Path("without.yaml"))
    assert recipe.evaluation.retain == {"general": None}  # measured on a set of its own
    assert len(recipe.data.sources) == 1 and "`data.sources`" in check_reality(recipe).warnings[0]


@pytest.mark.heavy
def test_the_base_writes_the_replayed_text_itself(run, cpt, capsys):
    source = run(general="self").data.sources[1]
    said = next(line for line in capsys.readouterr().out.splitlines() if "generate-replay" in line)
    words = said.partition(": cpt ")[2].split()
    assert " ".join(words) in " ".join(Path("recipe.yaml").read_text().replace("#", "").split())
    assert check_reality(load_recipe("recipe.yaml")).mistakes, "the folder is not there"
    assert words[-1] == source.path
    assert cpt(*words, "--min-characters", 1)[0] == 0
    assert check_reality(load_recipe("recipe.yaml")).mistakes == []


@pytest.mark.heavy
def test_bad_rows_and_repeats_become_settings(run, tmp_path):
    rows = [
        json.dumps({"content": f"Water boils at {i} degrees or so, said the cook."})
        for i in range(200)
    ]
    (tmp_path / "domain/domain.jsonl").write_text("\n".join([*rows, rows[0], "no json"]) + "\n")
    recipe = run()
    data = recipe.data
    assert (data.on_bad_row, data.deduplicate, data.sources[0].text_column) == (
        "skip",
        "exact",
        "content",
    )
    assert data.max_bad_share >= 1 / 202
    assert check_reality(recipe).mistakes == []


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("tokens", "options", "advised"),
    [
        (10**6, {}, {"2409.07431", "2603.04964", "2509.14786"}),
        (10**6, {"general": "none", "tokens": 10**5}, {"2409.07431"}),  # no replay, not repeated
        (2 * 10**7, {"shift": "strong"}, {"2603.04964", "2509.14786", "2510.14865"}),
        (10**9, {}, set()),
        (10**9, {"full": False}, {"raise `r`"}),
    ],
)
def test_advice_appears_where_the_corpus_has_the_size_for_it(
    run, monkeypatch, tokens, options, advised
):
    read = init_recipe.read_documents
    monkeypatch.setattr(
        init_recipe, "read_documents", lambda *given: replace(read(*given), tokens=tokens)
    )
    run(**options)
    known = ("2409.07431", "2603.04964", "2509.14786", "2510.14865", "raise `r`")
    assert {one for one in known if one in Path("recipe.yaml").read_text()} == advised


@pytest.mark.parametrize(
    ("options", "kind", "part"),
    [
        ({"gpu": "RTX 4900"}, ResourceError, "RTX 4090"),
        ({"model": "./nemo"}, RecipeError, "nemo"),
        ({"model": "./empty"}, RecipeError, "config.json"),
        ({"model": "some/where"}, CptError, "some/where"),
        ({"general": "./nowhere"}, DataError, "--general"),
        ({"documents": "./empty"}, DataError, "empty"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_written(run, tmp_path, options, kind, part):
    (tmp_path / "nemo").mkdir()
    (tmp_path / "nemo" / "m.nemo").touch()
    (tmp_path / "empty").mkdir()
    with pytest.raises(kind, match=part):
        run(**options)
    assert not (tmp_path / "recipe.yaml").exists()


def test_a_tokenizer_of_another_model_is_refused(run, tmp_path, tokenizer_folder):
    save_llama(tmp_path / "mixed", tokenizer_folder, 0, vocab_size=300)
    with pytest.raises(RecipeError, match="ids up to 319"):
        run(model="./mixed")


@pytest.mark.heavy
def test_a_menu_is_reported_with_the_transform_that_drops_it_and_is_never_a_prompt(
    run, tmp_path, capsys
):
    file = tmp_path / "domain/domain.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    menu = "Home and About and Documents and Download and Support and Purchase"
    for row in rows:
        row["text"] = f"{menu}\n\n{row['text']}"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = run()
    assert f"`{menu[:60]}`" in capsys.readouterr().out
    assert not any(prompt.startswith("Home") for prompt in recipe.evaluation.prompts)
    (warning,) = shared_line_warnings(recipe.data)
    assert "data.sources[0]" in warning
    comment = re.search(r"# transforms: (?:.*\n +# )*?.*\]\}\]\n", Path("recipe.yaml").read_text())
    written = Path("recipe.yaml").read_text().replace(comment[0], comment[0].replace("# ", ""))
    Path("recipe.yaml").write_text(written)
    assert shared_line_warnings(load_recipe("recipe.yaml").data) == []
