from cpt.reference.docstrings import arguments_of, summary_of


def documented():
    """One sentence that goes
    over two lines.

    Another paragraph.

    Args:
        first: one, with a colon: here.
        second, third: both
            of them.

    Returns:
        fourth: not an argument.
    """


def test_the_summary_ends_where_the_arguments_begin():
    assert summary_of(documented) == "One sentence that goes over two lines.\n\nAnother paragraph."


def test_each_argument_has_its_meaning_on_one_line():
    assert arguments_of(documented) == {
        "first": "one, with a colon: here.",
        "second": "both of them.",
        "third": "both of them.",
    }


def test_what_has_no_docstring_says_nothing():
    assert summary_of(lambda: None) == "" and arguments_of(lambda: None) == {}
