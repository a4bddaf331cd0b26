"""A recipe is loaded at once, with all its mistakes at once, and dumped so that it reads back equal."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cpt.errors import RecipeError
from cpt.recipe.load import REPOSITORY, dump_recipe, load_mixture, load_recipe, load_with_places
from cpt.recipe.schema import Budget, Data, Model, Recipe, Source
from cpt.recipe.tree import place_of

EXPERIMENT = REPOSITORY / "recipes/experiments/active/exp001_llama7b_pretrain.yaml"


def test_four_planted_mistakes_are_told_at_once_with_their_lines(mistakes, here):
    """A key of the schema, one under `training:`, one in a file reached by reference, a knob set twice."""
    (here / "model.yaml").write_text("path: some/model\n\natention: sdpa\n")
    assert mistakes(
        only=(
            "name: r\n"
            "model: model.yaml\n"
            "data:\n"
            "  sources: [{path: some/texts}]\n"
            "  sequence_lenght: 128\n"
            "budget: {tokens: 1000}\n"
            "optimizer: {learning_rate: 1e-5}\n"
            "training:\n"
            "  gradient_chekpointing: true\n"
            "  learning_rate: 2e-5\n"
        )
    ) == [
        "model.yaml:3: `model.atention` is not a key of `model`. Did you mean `attention`?",
        "r.yaml:5: `data.sequence_lenght` is not a key of `data`. Did you mean `sequence_length`?",
        (
            "r.yaml:9: `training.gradient_chekpointing` is not a key of TrainingArguments. Did you mean"
            " `gradient_checkpointing`?"
        ),
        (
            "r.yaml:10: one knob is set twice: `training.learning_rate` and `optimizer.learning_rate` (line 7). Keep"
            " `optimizer.learning_rate`"
        ),
    ]


def test_mistakes_of_reading_do_not_hide_the_others(mistakes):
    assert [line.partition(": ")[0] for line in mistakes("seed: 1\nseed: 2\ntags: !!set x\nmodle: 1\n")] == [
        "r.yaml:6",
        "r.yaml:7",
        "r.yaml:7",
        "r.yaml:8",
    ]


def test_a_recipe_that_is_not_there(here):
    with pytest.raises(RecipeError, match=r"^gone.yaml:1: no such file \(looked from .*\)\.$"):
        load_recipe("gone.yaml")


def test_a_recipe_may_lie_anywhere(here: Path, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "r.yaml"
    elsewhere.write_text("name: 3\n")
    with pytest.raises(RecipeError) as caught:
        load_recipe(elsewhere)
    assert str(caught.value).startswith(f"{elsewhere}:1: ")


def test_the_place_of_every_value_can_be_asked(load, here):
    load("seed: 1\n")
    _, root = load_with_places("r.yaml", ["tags=[a]"])
    assert str(place_of(root, ("seed",))) == "r.yaml:5"
    assert str(place_of(root, ("tags", 0))) == "on the command line: `tags=[a]`"


def test_loading_imports_neither_torch_nor_transformers():
    code = (
        "import sys\n"
        "from cpt.recipe.load import load_recipe\n"
        f"load_recipe({str(EXPERIMENT)!r}, ['model.lora=', 'seed=3'])\n"
        "print([name for name in ('torch', 'transformers', 'peft', 'trl', 'numpy') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize("recipe", ["prototype_rtx4090", "production_multi_gpu", "gpt2_124m_6gb", "cpt_code"])
def test_a_dumped_recipe_reads_back_equal(tmp_path, monkeypatch, recipe):
    monkeypatch.chdir(REPOSITORY)
    loaded = load_recipe(
        f"recipes/{recipe}.yaml", ["description=no", "tags=['1e-4', '010', 'null', 'on']"], lora=recipe == "cpt_code"
    )
    (tmp_path / "r.yaml").write_text(dump_recipe(loaded))
    assert load_recipe(tmp_path / "r.yaml") == loaded


def test_a_dumped_recipe_writes_defaults_and_nulls_in_the_schemas_order(load):
    text = dump_recipe(load())
    keys = [line.partition(":")[0] for line in text.splitlines() if not line.startswith((" ", "-"))]
    assert keys == list(Recipe.model_fields)
    assert "  revision: null\n" in text and "  learning_rate: 1e-5\n" in text and dump_recipe(load()) == text


PROTOTYPE = (REPOSITORY / "recipes/prototype_rtx4090.yaml").read_bytes()
SCRAPS = st.sampled_from(
    ["\t", ":", "- ", "{", "]", "&a ", "*a", "!!x ", "\x00", "'", "010", "null", "base: a.yaml\n", "<<: ", "1e9"]
)


@settings(
    max_examples=200, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    cuts=st.lists(
        st.tuples(st.integers(0, len(PROTOTYPE)), st.integers(0, 8), SCRAPS.map(str.encode) | st.binary(max_size=3)),
        min_size=1,
        max_size=4,
    )
)
def test_a_spoilt_recipe_is_a_recipe_error_with_lines_or_still_a_recipe(tmp_path, cuts):
    text = PROTOTYPE
    for at, length, scrap in cuts:
        text = text[:at] + scrap + text[at + length :]
    (tmp_path / "r.yaml").write_bytes(text)
    try:
        assert isinstance(load_recipe(tmp_path / "r.yaml"), Recipe)
    except RecipeError as problem:
        assert all(re.match(r".*\.yaml:\d+: ", line) for line in str(problem).splitlines())


TEXT = st.text(
    st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"], exclude_characters="\ufeff\ufffe\uffff"), max_size=20
)
WORDS = "no 1e-4 010 1:30 ~ << 0x1f 1_000 2024-01-01 true ' *a &a !a % @"
TRICKY = st.sampled_from([*WORDS.split(), "", " ", "\n", "a\n b\n", "a: b", "# x", "- a", '"'])
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT
    | TRICKY,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries((TEXT | TRICKY).filter(lambda key: key != "base"), inner, max_size=3)
    ),
    max_leaves=8,
)


@pytest.mark.slow
@settings(
    max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    config=st.dictionaries((TEXT | TRICKY).filter(lambda key: key not in ("base", "model_type")), VALUES, max_size=4),
    text=TEXT | TRICKY,
)
def test_any_value_survives_dumping(tmp_path, config, text):
    recipe = Recipe(
        name="r",
        description=text,
        model=Model(path="a/b", config={"model_type": "x", **config}),
        data=Data(sources=[Source(path="a/b")]),
        budget=Budget(tokens=1),
    )
    (tmp_path / "r.yaml").write_text(dump_recipe(recipe), encoding="utf-8")
    assert load_recipe(tmp_path / "r.yaml") == recipe


def test_a_mixture_file_is_a_data_section_alone(here):
    (here / "m.yaml").write_text("sequence_length: 64\nsources: [{path: a/b}]\n")
    (here / "on_top.yaml").write_text("base: m.yaml\nsequence_length: 64\n")
    assert load_mixture("m.yaml")[0].sources[0].path == "a/b"
    assert load_mixture("on_top.yaml", ["data.packing=none"])[0].model_dump(
        include={"sequence_length", "packing"}
    ) == {
        "sequence_length": 64,
        "packing": "none",
    }


def test_a_mixture_is_read_from_a_recipe_too(here):
    (here / "r.yaml").write_text(
        "name: r\nseed: 3\nmodel: {path: a/b}\nbudget: {epochs: 1}\ndata: {sources: [{path: a/b}]}\n"
    )
    data, seed = load_mixture("r.yaml")
    assert data.sources[0].path == "a/b" and seed == 3


def test_a_mixture_file_that_is_not_there_is_told(here):
    with pytest.raises(RecipeError, match="m.yaml.*no such file"):
        load_mixture("m.yaml")
