import pytest
import torch
from tiny import SHAPE
from tiny_models import make_tokenizer
from transformers import LlamaConfig, LlamaForSequenceClassification

from cpt.errors import DataError, RecipeError, TrainingError
from cpt.recipe.schema import Reward
from cpt.stages.rewards import (
    MOST_UNSCORED,
    REWARDS,
    build_rewards,
    exact_match,
    find_rewards,
    length,
    load_reward_model,
    matches_format,
    maths_answer,
    reward_model,
)

GIVEN = {
    "prompts": ["1+1?", "2+2?"],
    "completions": ["2", "5"],
    "completion_ids": [[1], [2, 3]],
    "answer": ["2", "4"],
}


def built(*rewards: Reward, columns=("answer",)):
    return build_rewards(rewards, list(columns))


def test_rewards_are_called_by_name_with_their_options():
    rewards = built(
        Reward(name="exact_match"),
        Reward(name="format", pattern="2|4"),
        Reward(name="length", at_most=1, weight=0.5),
    )
    assert [reward.__name__ for reward in rewards] == ["exact_match", "format", "length"]
    assert [reward(**GIVEN) for reward in rewards] == [[1, 0], [1, 0], [1, 0]]


def test_a_run_in_which_no_reward_ever_applies_ends(monkeypatch):
    monkeypatch.setitem(REWARDS, "never", lambda completions: [None] * len(completions))
    one, other = built(Reward(name="never"), Reward(name="never"))
    for _ in range(MOST_UNSCORED - 1):
        one(**GIVEN), other(**GIVEN)
    with pytest.raises(TrainingError, match=r"rewards\[0\].*rewards\[1\].*None"):
        one(**GIVEN), other(**GIVEN)
    with pytest.raises(TrainingError):
        one.unscored.check_end()


def test_a_reward_that_applies_to_some_completions_is_enough(monkeypatch):
    monkeypatch.setitem(REWARDS, "never", lambda completions: [None] * len(completions))
    monkeypatch.setitem(
        REWARDS, "first", lambda completions: [1.0, *[None] * (len(completions) - 1)]
    )
    for names in (("never", "first"), ("first", "never"), ("first",)):
        rewards = built(*(Reward(name=name) for name in names))
        for _ in range(3 * MOST_UNSCORED):
            for reward in rewards:
                reward(**GIVEN)
        rewards[0].unscored.check_end()


def test_an_end_is_refused_only_where_batches_in_a_row_were_not_scored(monkeypatch):
    given = iter([None] * (MOST_UNSCORED - 1) + [1.0] + [None] * MOST_UNSCORED)
    monkeypatch.setitem(REWARDS, "rarely", lambda completions: [next(given)] * len(completions))
    (reward,) = built(Reward(name="rarely"))
    for _ in range(2 * MOST_UNSCORED - 1):
        reward(**GIVEN)
    reward.unscored.check_end()
    with pytest.raises(TrainingError, match=f"last {MOST_UNSCORED} batches"):
        reward(**GIVEN)


def test_several_of_one_kind_have_different_names():
    names = ("format", "exact_match", "format", "format")
    options = {"format": {"pattern": "a"}, "exact_match": {}}
    rewards = built(*(Reward(name=name, **options[name]) for name in names))
    found = [reward.__name__ for reward in rewards]
    assert found == ["format", "exact_match", "format_2", "format_3"]


@pytest.mark.parametrize(
    ("reward", "named"),
    [
        (Reward(name="exact_mach"), "exact_match"),
        (Reward(name="format"), r"rewards\[0\].*pattern"),
        (Reward(name="format", pattern="("), r"rewards\[0\]"),
        (Reward(name="length", at_least="long"), "at_least"),
        (Reward(name="length", at_least=3, at_most=2), "at_least <= at_most"),
        (Reward(name="length", at_least=-1), "at_least <= at_most"),
        (Reward(name="length", at_most=9, falloff=-1), "falloff >= 0"),
        (Reward(name="exact_match", colum="a"), "column"),
    ],
)
def test_mistakes_are_found_before_anything_is_loaded(reward, named):
    with pytest.raises(RecipeError, match=named):
        find_rewards([reward])


def test_bounds_that_are_equal_or_zero_are_accepted():
    find_rewards([Reward(name="length", at_least=2, at_most=2), Reward(name="length", at_most=0)])


def test_a_missing_column_is_named_before_the_run():
    with pytest.raises(DataError, match=r"`rewards\[1\]`.*`solution`"):
        built(Reward(name="exact_match"), Reward(name="maths_answer", column="solution"))
    with pytest.raises(DataError, match=r"`answer`. Columns besides the prompt: city, year\."):
        built(Reward(name="exact_match"), columns=("prompts", "city", "year"))
    with pytest.raises(DataError, match=r"Columns besides the prompt: none\."):
        built(Reward(name="maths_answer"), columns=())


# --- the user's own ---


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A reward of the user's own: a function with these parameters that returns this."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)

    def write(parameters: str, returned: str, **options: object) -> Reward:
        name = f"own_rewards_{tmp_path.name.replace('-', '_')}"
        (tmp_path / f"{name}.py").write_text(
            f"import numpy, torch\ndef reward({parameters}):\n    return {returned}\n"
        )
        return Reward(name=f"{name}:reward", **options)

    return write


def test_columns_are_parameters_and_options_are_keyword_only(own):
    reward = own(
        "completions, answer, *, worth=1.0",
        "[worth * (a == c) for a, c in zip(answer, completions)]",
        worth=3,
    )
    assert built(reward)[0](**GIVEN) == [3, 0]
    with pytest.raises(DataError, match="`answer`"):
        built(reward, columns=("solution",))


def test_an_option_does_not_collide_with_a_column_of_its_name(own):
    (reward,) = built(
        own("prompts, completions, *, answer='2', **columns", "[c == answer for c in completions]")
    )
    assert reward(**GIVEN) == [1, 0]


@pytest.mark.parametrize(
    ("parameters", "returned", "values"),
    [
        ("prompts, completions, **columns", "[len(columns)] * 2", [2, 2]),
        ("completions", "[None, True]", [None, 1.0]),
        ("completions", "numpy.array([0.5, 1])", [0.5, 1.0]),
        ("completions", "torch.tensor([0.0, 1.0])", [0.0, 1.0]),
    ],
)
def test_rewards_may_be_numbers_arrays_tensors_and_none_where_they_do_not_apply(
    own, parameters, returned, values
):
    (reward,) = built(own(parameters, returned))
    assert reward(**GIVEN) == values


@pytest.mark.parametrize(
    ("returned", "named"),
    [
        ("[1.0]", "2 numbers"),
        ("[1.0, float('nan')]", "nan.*completion: '5'"),
        ("['good', 1.0]", r"'good'.*prompt: '1\+1\?'"),
        ("1 / 0", "ZeroDivisionError"),
    ],
)
def test_what_is_no_reward_is_named_with_its_row(own, returned, named):
    (reward,) = built(own("completions", returned))
    with pytest.raises(TrainingError, match=rf"`rewards\[0\]`.*{named}"):
        reward(**GIVEN)


def test_an_error_shows_the_beginning_of_a_long_prompt(own):
    (reward,) = built(own("completions", "['good'] * len(completions)"))
    with pytest.raises(TrainingError, match=f"prompt: '{'p' * 300}'; the completion: 'no'"):
        reward(**{**GIVEN, "prompts": ["p" * 301, "?"], "completions": ["no", "2"]})


def test_an_error_of_cpt_in_a_reward_is_its_own(monkeypatch):
    def fails(completions):
        raise DataError("the table has no such row")

    monkeypatch.setitem(REWARDS, "fails", fails)
    (reward,) = built(Reward(name="fails"))
    with pytest.raises(DataError, match="^the table has no such row$"):
        reward(**GIVEN)


# --- texts ---

SAID = [{"role": "assistant", "content": " Paris\n"}]
IN_PARTS = [
    {
        "role": "assistant",
        "content": [{"type": "text", "text": "Par"}, {"type": "text", "text": "is"}],
    }
]
SILENT = [{"role": "assistant", "tool_calls": []}]


def test_an_exact_match_reads_texts_and_messages_and_ignores_space_and_case_unless_told_otherwise():
    said, answers = ["paris ", SAID, IN_PARTS, SILENT, "Paris.", "7"], ["Paris"] * 5 + [7]
    assert exact_match(["?"] * 6, said, answer=answers) == [1, 1, 1, 0, 0, 1]
    assert exact_match(
        ["?"] * 2, ["paris", "Paris"], column="city", case_sensitive=True, city=["Paris"] * 2
    ) == [0, 1]


def test_a_format_has_to_match_the_whole_completion():
    said = ["<a>\nx</a>", "<a>x</a> and more", [{"role": "assistant", "content": "<a></a>"}]]
    assert matches_format(["?"] * 3, said, pattern="<a>.*</a>") == [1, 0, 1]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"at_most": 4}, [1, 1, 0]),
        ({"at_least": 4}, [0, 1, 1]),
        ({"at_most": 4, "falloff": 8}, [1, 1, 0.5]),
        ({"at_least": 4, "at_most": 4, "falloff": 4}, [0.5, 1, 0]),
    ],
)
def test_a_length_falls_off_outside_of_its_bounds(options, expected):
    ids = [[0] * 2, [0] * 4, [0] * 8]
    assert length(["?"] * 3, ["xx", "xxxx", "x" * 8], ids, unit="tokens", **options) == expected
    assert (
        length(["?"] * 3, ["xx", "xxxx", "x" * 8], [[]] * 3, unit="characters", **options)
        == expected
    )


# --- maths ---


RIGHT = [
    (r"so \boxed{1} or rather \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
    ("It takes 3 days, that is 72 hours.", "72"),
    (r"\boxed{4", "4"),
    ("72", 72),
    ("#### 1,234,567", "1234567"),
    (r"\boxed{\dfrac{3}{4}}", "0.75"),
    (r"\boxed{-2\frac{1}{2}}", "-2.5"),
    (r"\boxed{50\%}", "0.5"),
    ("it is 50", "50%"),
    (r"$x = 5$, so \boxed{x=5}", "5"),
    ("about 0.333333333", "1/3"),
    (r"\boxed{12\text{ cm}}", r"12\text{cm}"),
    (r"\boxed{\left( 2x + 1 \right)}", "(2x+1)"),
    ("The answer is −3.", "-3"),
    ("we get 5.", "The sum is\n#### 5"),
    (r"\boxed{50\%}", "50"),
    (r"\boxed{2\frac12}", "2.5"),
    (r"\boxed{\frac12}", ".5"),
    ("#### 1\nno: #### 72.\nas 9 x 8 is 72", "72"),
    (r"\boxed{90^{\circ}}", "90"),
    (r"\boxed{\text{Yes}}", "$yes$"),
    ("it is 1e3", "1,000"),
    ("1000000.5", "1000000"),  # the tolerance is relative above 1
    ("-1000000.5", "-1000000"),
    ("0.0000005", "0"),  # and absolute below
]
WRONG = [
    ("no number", "72"),
    ("73", "72"),
    (r"\boxed{}", ""),
    (r"\boxed{0.34}", "1/3"),
    (r"\boxed{2x}", "x"),
    (r"\boxed{1/0}", "0"),
    ("12,34", "1234"),
    (r"\boxed{72} or rather \boxed{73}", "72"),
    ("it is 51", "50%"),
    ("5000%", "50%"),
    ("0.5", "50"),
    ("5000", "50"),
    (r"\boxed{.5}", "5"),
    ("0.33334", "1/3"),
    ("1000001.5", "1000000"),
]


@pytest.mark.parametrize(
    ("said", "answer", "reward"), [*((*case, 1) for case in RIGHT), *((*case, 0) for case in WRONG)]
)
def test_equal_answers_in_other_words_are_right_and_others_are_wrong(said, answer, reward):
    assert maths_answer(["?"], [said], answer=[answer]) == [reward]


def test_maths_takes_messages_another_column_and_a_tolerance():
    said = [{"role": "assistant", "content": "it is 3.14"}]
    assert maths_answer([[]], [said], column="solution", tolerance=0.01, solution=["3.14159"]) == [
        1
    ]


# --- models ---


def save_reward_model(folder, num_labels=1, pad_token=None):
    """Without a token for padding, rows are padded with EOS."""
    torch.manual_seed(0)
    config = LlamaConfig(**SHAPE, intermediate_size=48, num_labels=num_labels, pad_token_id=2)
    model, tokenizer = LlamaForSequenceClassification(config).eval(), make_tokenizer()
    tokenizer.pad_token = pad_token
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model, tokenizer


@torch.no_grad()
@pytest.mark.parametrize("pad_token", [None, "w40"])
def test_rewards_are_the_models_own_scores_whatever_the_batch(pad_token, tmp_path):
    model, tokenizer = save_reward_model(tmp_path / "judge", pad_token=pad_token)
    prompts, said = ["w3 w4 ", "w5 ", "w6 "], ["w7", "w8 w9 w10", "w11"]
    texts = [prompt + answer for prompt, answer in zip(prompts, said, strict=True)]
    ids = [tokenizer(text, return_tensors="pt", add_special_tokens=False) for text in texts]
    expected = [model(**each).logits[0, 0].item() for each in ids]
    for options in ({"batch_size": 1}, {"batch_size": 2}, {}):
        found = reward_model(prompts, said, path=str(tmp_path / "judge"), **options)
        assert found == pytest.approx(expected, abs=1e-5)


def test_messages_go_through_the_models_template_and_a_run_is_its_export(tmp_path):
    save_reward_model(tmp_path / "rm" / "final")
    prompt, said = [{"role": "user", "content": "w3"}], [{"role": "assistant", "content": "w4"}]
    found = reward_model([prompt], [said], path=str(tmp_path / "rm"))
    assert reward_model(["w3 "], ["w4"], path=str(tmp_path / "rm")) == pytest.approx(
        found, abs=1e-6
    )
    assert not any(
        parameter.requires_grad
        for parameter in load_reward_model(str(tmp_path / "rm"))[0].parameters()
    )


@pytest.mark.parametrize("num_labels", [None, 2])
def test_what_is_no_reward_model_is_refused_before_the_run(num_labels, tmp_path):
    if num_labels is not None:
        save_reward_model(tmp_path / "judge", num_labels=num_labels)
    with pytest.raises(RecipeError, match="judge"):
        build_rewards([Reward(name="reward_model", path=str(tmp_path / "judge"))], [])
