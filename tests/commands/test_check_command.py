import pytest
from tiny import write_recipe
from transformers import AutoConfig, Gemma2ForCausalLM

from cpt.cli import main
from cpt.errors import RecipeError
from cpt.models.attention import choose_attention
from cpt.optim.build import find_optimizer
from cpt.plugins import import_named
from cpt.recipe.load import load_recipe


@pytest.fixture
def check(capsys):
    """`cpt check WORDS`: the exit code, and what it prints."""

    def typed(*words) -> tuple[int, str]:
        with pytest.raises(SystemExit) as ended:
            main(["check", *map(str, words)])
        shown = capsys.readouterr()
        return ended.value.code, shown.out + shown.err

    return typed


def test_the_quick_check_reads_the_recipe_alone(check, tiny_recipe, tmp_path):
    path = write_recipe({**tiny_recipe, "model": {"path": "no/such/model"}}, tmp_path / "r.yaml")
    code, printed = check(path, "--quick")
    assert code == 0 and "Not checked" in printed
    path.write_text(path.read_text() + "optimiser: {name: adamw}\n")
    assert check(path, "--quick")[0] == 2


@pytest.mark.parametrize("text", ["base_model: a/b\ndatasets: [{path: c}]\n", "model_name_or_path: a/b\ndataset: c\n"])
def test_a_config_of_another_tool_is_one_mistake_with_the_command(tmp_path, text):
    (tmp_path / "other.yaml").write_text(text)
    with pytest.raises(RecipeError, match="cpt import") as refused:
        load_recipe(tmp_path / "other.yaml")
    assert len(str(refused.value).splitlines()) == 1


def test_the_remedy_for_an_unknown_optimizer_can_be_written():
    with pytest.raises(RecipeError, match="torch.optim:NAdam"):
        find_optimizer("nadam")
    assert import_named("torch.optim:NAdam")
    with pytest.raises(RecipeError) as refused:
        find_optimizer("nothing_like_it")
    assert "Did you mean" not in str(refused.value)


def test_the_remedy_for_an_attention_that_a_model_lacks_is_one_that_it_has():
    config = AutoConfig.for_model("gemma2")
    for wanted in ("varlen", "sdpa"):
        with pytest.raises(RecipeError, match="`model.attention: auto`"):
            choose_attention(wanted, Gemma2ForCausalLM, config=config, packed=True)
    assert choose_attention("auto", Gemma2ForCausalLM, config=config, packed=True) == "eager"
