"""A recipe is loaded with its overrides, with all its mistakes at once, and dumped so that it reads back equal."""

import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cpt.errors import RecipeError
from cpt.recipe.load import REPOSITORY, dump_recipe, load_recipe, load_section
from cpt.recipe.schema import Recipe


def test_a_recipe_that_is_not_there_is_refused(here):
    with pytest.raises(RecipeError, match=r"^gone.yaml:1: "):
        load_recipe("gone.yaml")


# Paths


def test_home_and_variables_are_replaced_in_every_path(load, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("DATA", "/data")
    loaded = load(
        "output_dir: ~/runs\ncheckpoints: {archive: $DATA/archive}\n",
        "model.path=~/base",
        "tokenizer.path=${DATA}/tokenizer",
        "data.sources=[{path: $DATA/a.jsonl}, {path: ~/b*.jsonl}]",
        "data.filters=[{name: decontaminate, against: [~/exam.txt, $DATA/quiz.txt]}]",
        "evaluation.perplexity=[{path: ~/held_out.jsonl}]",
        "evaluation.tasks=[{name: quiz, folder: ~/tasks}]",
    )
    assert str(loaded.output_dir) == "/home/me/runs"
    assert loaded.checkpoints.archive == "/data/archive"
    assert (loaded.model.path, loaded.tokenizer.path) == ("/home/me/base", "/data/tokenizer")
    assert [source.path for source in loaded.data.sources] == ["/data/a.jsonl", "/home/me/b*.jsonl"]
    assert loaded.data.filters[0].options["against"] == ["/home/me/exam.txt", "/data/quiz.txt"]
    assert loaded.evaluation.perplexity[0].path == "/home/me/held_out.jsonl"
    assert loaded.evaluation.tasks[0].options["folder"] == "/home/me/tasks"


def test_a_variable_that_is_not_set_is_named_with_its_line(load, monkeypatch):
    monkeypatch.delenv("GONE", raising=False)
    with pytest.raises(
        RecipeError, match=r"yaml:\d+: `output_dir`.*`GONE` is not set.*export GONE="
    ):
        load("output_dir: $GONE/runs\n")


def test_a_dollar_in_a_text_or_in_the_name_of_a_file_stays(load, here, monkeypatch):
    (here / "a$b.jsonl").write_text('{"text": "a"}\n')
    loaded = load("", "data.sources=[{path: a$b.jsonl, template: '{text} costs $5'}]")
    assert loaded.data.sources[0].path == "a$b.jsonl"
    assert loaded.data.sources[0].template == "{text} costs $5"


# Overrides


@pytest.mark.parametrize("key", ["data.sources.0.weight", "data.sources[0].weight"])
def test_an_entry_of_a_list_is_named_by_its_number(load, key):
    assert load("", f"{key}=3", f"{key}=2").data.sources[0].weight == 2


def test_a_whole_entry_and_a_whole_list_can_be_replaced(load):
    assert load("", "data.sources.0={path: a/b}").data.sources[0].path == "a/b"
    replaced = load("", "data.sources=[{path: a/b}, {path: c/d}]").data.sources
    assert [source.path for source in replaced] == ["a/b", "c/d"]


def test_an_override_makes_the_sections_on_its_way_and_an_empty_value_is_null(load):
    assert load(
        "tokenizer: {path: null}\n", "model={path: a/b, lora: null}", "model.lora.r=4"
    ).model.lora == {"r": 4}
    assert load("checkpoints: {every_steps: 5}\n", "checkpoints.keep=").checkpoints.keep is None


@pytest.mark.parametrize(
    ("overrides", "path", "dtype"),
    [
        (["model=m.yaml", "model.dtype=float32"], "from/file", "float32"),
        (["model.base=m.yaml"], "some/model", "float16"),
    ],
)
def test_a_file_can_replace_a_section_or_be_put_below_it(load, here, overrides, path, dtype):
    (here / "m.yaml").write_text("path: from/file\ndtype: float16\n")
    model = load("", *overrides).model
    assert (model.path, model.dtype) == (path, dtype)


def test_a_base_below_another_files_keys_would_have_no_effect_and_is_refused(mistakes, here):
    for name in ("one", "two"):
        (here / f"{name}.yaml").write_text(f"path: from/{name}\n")
    (found,) = mistakes("", "model=one.yaml", "model.base=two.yaml")
    assert "`model=FILE`" in found


@pytest.mark.parametrize(
    "override",
    [
        "modle.path=x",
        "model.pth=x",
        "seed",
        "=3",
        "data.sources.1.weight=2",
        "data.sources.x=2",
        "name.first=2",
    ]
    + ["training.learning_rate=1", "seed=[1", "seed=010", "model=gone.yaml"],
)
def test_a_mistake_quotes_the_override(mistakes, override):
    assert mistakes("", override)[0].startswith(f"on the command line: `{override}`: ")


def test_lora_adds_the_defaults_and_keeps_what_the_recipe_says(load):
    assert load(lora=True).model.lora == {}
    assert load("", "model.lora={r: 4}", lora=True).model.lora == {"r": 4}


# Dumping


@pytest.mark.parametrize("recipe", ["prototype_rtx4090", "gpt2_124m_6gb", "cpt_code"])
def test_a_dumped_recipe_reads_back_equal(tmp_path, monkeypatch, recipe):
    monkeypatch.chdir(REPOSITORY)
    overrides = ["description=no", "tags=['1e-4', '010', 'null', 'on']"]
    loaded = load_recipe(f"recipes/{recipe}.yaml", overrides, lora=recipe == "cpt_code")
    (tmp_path / "r.yaml").write_text(dump_recipe(loaded))
    assert load_recipe(tmp_path / "r.yaml") == loaded


def test_a_dumped_recipe_has_defaults_and_nulls_in_the_schemas_order(load):
    text = dump_recipe(load())
    keys = [line.partition(":")[0] for line in text.splitlines() if not line.startswith((" ", "-"))]
    assert keys == list(Recipe.model_fields)
    assert (
        "  revision: null\n" in text
        and "  learning_rate: 1e-5\n" in text
        and dump_recipe(load()) == text
    )


PROTOTYPE = (REPOSITORY / "recipes/prototype_rtx4090.yaml").read_bytes()
SCRAPS = st.sampled_from(
    [
        "\t",
        ":",
        "- ",
        "{",
        "]",
        "&a ",
        "*a",
        "!!x ",
        "\x00",
        "'",
        "010",
        "null",
        "base: a.yaml\n",
        "<<: ",
        "1e9",
    ]
)
CUT = st.tuples(
    st.integers(0, len(PROTOTYPE)),
    st.integers(0, 8),
    SCRAPS.map(str.encode) | st.binary(max_size=3),
)


@settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(cuts=st.lists(CUT, min_size=1, max_size=4))
def test_a_spoilt_recipe_is_a_recipe_error_with_lines_or_still_a_recipe(tmp_path, cuts):
    text = PROTOTYPE
    for at, length, scrap in cuts:
        text = text[:at] + scrap + text[at + length :]
    (tmp_path / "r.yaml").write_bytes(text)
    try:
        assert isinstance(load_recipe(tmp_path / "r.yaml"), Recipe)
    except RecipeError as problem:
        assert all(re.match(r".*\.yaml:\d+: ", line) for line in str(problem).splitlines())


# Mixtures


def test_a_mixture_file_is_a_data_section_alone(here):
    (here / "m.yaml").write_text("sequence_length: 64\nsources: [{path: a/b}]\n")
    (here / "on_top.yaml").write_text("base: m.yaml\nsequence_length: 32\n")
    assert load_section("m.yaml", "data").data.sources[0].path == "a/b"
    data = load_section("on_top.yaml", "data", ["data.packing=token_budget"]).data
    assert (data.sequence_length, data.packing) == (32, "token_budget")
    with pytest.raises(RecipeError, match="gone.yaml"):
        load_section("gone.yaml", "data")
    (here / "m.yaml").write_text("sources: [{path: a.jsonl, split: test}]\n")
    with pytest.raises(RecipeError, match=r"m.yaml:1: `data.sources\[0\].split`"):
        load_section("m.yaml", "data")


def test_a_mixture_is_read_from_a_recipe_too(load):
    load("seed: 3\n")
    recipe = load_section("r.yaml", "data")
    assert recipe.data.sources[0].path == "some/texts" and recipe.seed == 3


def test_a_models_file_is_a_model_section_alone(here):
    (here / "m.yaml").write_text("config: {model_type: llama}\n")
    recipe = load_section("m.yaml", "model", ["model.from_scratch=true", "seed=3"])
    assert recipe.model.from_scratch and recipe.model.path is None and recipe.seed == 3
    with pytest.raises(RecipeError, match="from_scratch: true"):
        load_section("m.yaml", "model")
