import pytest

from cpt.stages.rewards import as_number, found_in, maths_answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{1} or rather \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        ("3 + 4 = 7\n#### 7", "7"),
        ("It takes 3 days, that is 72 hours.", "72"),
        (r"\boxed{4", "4"),
        ("no number", ""),
    ],
)
def test_what_a_completion_comes_to(text, answer):
    assert found_in(text) == answer


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        ("72", 72),
        ("#### 1,234,567", "1234567"),
        (r"\boxed{\dfrac{3}{4}}", "0.75"),
        (r"\boxed{\frac12}", "1/2"),
        (r"\boxed{1\frac{1}{2}}", "1.5"),
        (r"\boxed{-2\frac{1}{2}}", "-2.5"),
        (r"\boxed{50\%}", "0.5"),
        (r"\boxed{50\%}", "50"),
        ("it is 50", "50%"),
        (r"$x = 5$, so \boxed{x=5}", "5"),
        ("about 0.333333333", "1/3"),
        (r"\boxed{12\text{ cm}}", r"12\text{cm}"),
        (r"\boxed{\left( 2x + 1 \right)}", "(2x+1)"),
        ("The answer is −3.", "-3"),
        ("The answer is 1e3", "1000"),
        ("we get 5.", "The sum is\n#### 5"),
    ],
)
def test_equal_answers_in_other_words_are_right(said, answer):
    assert maths_answer(["?"], [said], answer=[answer]) == [1]


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        ("73", "72"),
        ("", "72"),
        ("no number", "72"),
        (r"\boxed{}", ""),
        (r"\boxed{0.34}", "1/3"),
        (r"\boxed{2x}", "x"),
        (r"\boxed{1/0}", "0"),
        ("500", "5%"),
        ("12,34", "1234"),
        (r"\boxed{72} or rather \boxed{73}", "72"),
    ],
)
def test_others_are_wrong(said, answer):
    assert maths_answer(["?"], [said], answer=[answer]) == [0]


def test_messages_are_read_like_texts_and_the_column_can_be_chosen():
    said = [{"role": "assistant", "content": "it is 4"}]
    assert maths_answer([[]], [said], column="solution", solution=["4"]) == [1]


def test_a_tolerance_can_be_given():
    assert maths_answer(["?"], ["3.14"], tolerance=0.01, answer=["3.14159"]) == [1]


@pytest.mark.parametrize("text", ["", "abc", "nan", "inf", "--1", "1/0", "(", "1 2 x", "1.2.3"])
def test_what_is_no_number(text):
    assert as_number(text) is None
