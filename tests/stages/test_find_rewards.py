import pytest

from cpt.errors import DataError, RecipeError, TrainingError
from cpt.recipe.schema import Reward
from cpt.stages.rewards import build_rewards, find_rewards

GIVEN = {"prompts": ["1+1?", "2+2?"], "completions": ["2", "5"], "completion_ids": [[1], [2, 3]], "answer": ["2", "4"]}


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A reward of the user's own with this text."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    number = iter(range(100))

    def write(text: str, **options: object) -> Reward:
        name = f"own_rewards_{tmp_path.name.replace('-', '_')}_{next(number)}"
        (tmp_path / f"{name}.py").write_text(text)
        return Reward(name=f"{name}:reward", **options)

    return write


def built(*rewards: Reward, columns=("answer",)):
    return build_rewards(rewards, list(columns))


def test_rewards_are_called_by_name_with_their_options():
    exact, ends, short = built(
        Reward(name="exact_match"), Reward(name="format", pattern="2|4"), Reward(name="length", at_most=1, weight=0.5)
    )
    assert [reward.__name__ for reward in (exact, ends, short)] == ["exact_match", "format", "length"]
    assert [reward(**GIVEN) for reward in (exact, ends, short)] == [[1, 0], [1, 0], [1, 0]]


def test_two_of_one_kind_have_names_of_their_own():
    first, second = built(Reward(name="format", pattern="a"), Reward(name="format", pattern="b"))
    assert (first.__name__, second.__name__) == ("format", "format_2")


@pytest.mark.parametrize(
    ("reward", "says"),
    [
        (Reward(name="exact_mach"), "Did you mean `exact_match`"),
        (Reward(name="format"), r"`rewards\[0\]` needs `pattern`"),
        (Reward(name="format", pattern="("), "not a regular expression"),
        (Reward(name="length", at_least="long"), "expected a whole number"),
        (Reward(name="length", at_least=3, at_most=2), "at_least <= at_most"),
        (Reward(name="exact_match", colum="a"), "Did you mean `column`"),
    ],
)
def test_mistakes_are_found_before_anything_is_loaded(reward, says):
    with pytest.raises(RecipeError, match=says):
        find_rewards([reward])


def test_a_missing_column_is_named_before_the_run():
    with pytest.raises(DataError, match=r"`rewards\[1\]`.*`solution`.*answer"):
        built(Reward(name="exact_match"), Reward(name="maths_answer", column="solution"))


def test_columns_of_an_own_reward_are_its_parameters_and_options_stand_behind_the_star(own):
    text = (
        "def reward(completions, answer, *, worth=1.0):\n    return [worth * (a == c) for a, c in zip(answer,"
        " completions)]\n"
    )
    (reward,) = built(own(text, worth=3))
    assert reward(**GIVEN) == [3, 0]
    with pytest.raises(DataError, match="reads the column `answer`"):
        built(own(text), columns=("solution",))


def test_an_option_does_not_collide_with_a_column_of_its_name(own):
    text = (
        "def reward(prompts, completions, *, answer='2', **columns):\n    return [float(c == answer) for c in"
        " completions]\n"
    )
    (reward,) = built(own(text))
    assert reward(**GIVEN) == [1, 0]


def test_all_columns_can_be_taken(own):
    (reward,) = built(own("def reward(prompts, completions, **columns):\n    return [len(columns)] * 2\n"))
    assert reward(**GIVEN) == [2, 2]


def test_none_says_that_it_does_not_apply_and_other_numbers_are_numbers(own):
    (reward,) = built(own("def reward(completions):\n    return [None, True]\n"))
    assert reward(**GIVEN) == [None, 1.0]
    (reward,) = built(own("import numpy\ndef reward(completions):\n    return numpy.array([0.5, 1])\n"))
    assert reward(**GIVEN) == [0.5, 1.0]


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        ("[1.0]", "2 numbers"),
        ("[1.0, float('nan')]", "nan.*completion: '5'"),
        ("['good', 1.0]", "'good'.*prompt: '1\\+1\\?'"),
        ("1.0", "1.0"),
        ("1 / 0", "ZeroDivisionError"),
    ],
)
def test_what_is_no_reward_is_named_with_its_row(own, returned, says):
    (reward,) = built(own(f"def reward(completions):\n    return {returned}\n"))
    with pytest.raises(TrainingError, match=rf"`rewards\[0\]`.*{says}"):
        reward(**GIVEN)


def test_tensors_count_as_lists(own):
    (reward,) = built(own("import torch\ndef reward(completions):\n    return torch.tensor([0.0, 1.0])\n"))
    assert reward(**GIVEN) == [0, 1]
