import inspect
import random
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import write_documents

from cpt.data.readers import filters
from cpt.data.readers.documents import Document, Origin
from cpt.data.readers.filters import build_components, reason_to_drop
from cpt.errors import RecipeError, UserCodeError
from cpt.files import key_of
from cpt.recipe.schema import Component, Source

PROSE = " ".join(f"the house of number{number} and road{number * 7}" for number in range(20))


def view(text):
    return {"text": text, "source": "s", "where": "s.txt"}


def test_the_first_refusing_filter_gives_the_reason():
    components = [
        Component(name="length", min_characters=2, max_characters=3),
        Component(name="pattern", drop="a"),
    ]
    built = build_components("filter", {"data.filters": components[:1], "k": components[1:]})
    reasons = [reason_to_drop(view(text), built) for text in ("a", "abcd", "ab", "bcd")]
    assert reasons == ["shorter than 2 characters", "longer than 3 characters", "matches a", None]


@pytest.mark.parametrize(
    "component, message",
    [
        (Component(name="lenght"), "`length`"),
        (Component(name="length", min_chars=3), r"`data.filters\[0\].min_chars`"),
        (Component(name="language"), r"`data.filters\[0\]` needs `keep`"),
        (Component(name="gopher_quality", stop_words="the"), r"`data.filters\[0\].stop_words`"),
        (Component(name="no_such_module:check"), "`no_such_module`"),
    ],
)
def test_a_wrong_filter_is_refused_with_its_place(component, message):
    with pytest.raises(RecipeError, match=message):
        build_components("filter", {"data.filters": [component]})


def test_normalise_writes_the_same_text_in_one_way():
    assert filters.normalise(view("\ufeffa\u0301 \r\nb\t\rc\n\n"))["text"] == "á\nb\nc"
    assert (
        filters.normalise(view("ﬁ"))["text"] == "ﬁ"
        and filters.normalise(view("ﬁ"), form="NFKC")["text"] == "fi"
    )
    as_it_is = filters.normalise(view("e\u0301  \r\n"), form=None, keep_trailing_whitespace=True)
    assert as_it_is["text"] == "e\u0301  \n"


def test_c4_keeps_lines_that_are_sentences():
    lines = [
        "A good line with enough words[1].",
        "Too short.",
        "A line with enough words but no end",
        "Please enable JavaScript to see this page now.",
        "By reading you accept our Cookie Policy today.",
        "And so the story went on and on...",
    ]
    assert filters.c4_lines(view("\n".join(lines)))["text"] == "A good line with enough words."
    unended = filters.c4_lines(view("\n".join(lines)), require_punctuation=False)["text"]
    assert len(unended.splitlines()) == 3


# Published rules


@pytest.mark.parametrize(
    "text, reason",
    [
        ("the and " * 24, "fewer than 50 words"),
        ("word " * 100_001, "more than 100000 words"),
        ("of a " * 50, "mean word length"),
        ("the incomprehensibilities " * 50, "mean word length"),
        (PROSE + " #x" * 20, "symbols"),
        ("\n".join(f"- {line}" for line in PROSE.split(" the ")), "bullets"),
        (PROSE + "...\n" + PROSE + "\n" + PROSE + "…", "ellipsis"),
        (PROSE + " 12345" * 40, "have a letter"),
        (PROSE.replace("of", "off").replace("and", "plus"), "stop words"),
    ],
    ids=lambda value: value[:20],
)
def test_each_rule_of_gophers_quality_has_its_reason(text, reason):
    assert reason in filters.gopher_quality(view(text))


NO_LIMITS = {
    filters.gopher_quality: {
        "min_words": 0,
        "max_words": 99,
        "min_mean_word_length": 0,
        "max_mean_word_length": 99,
        "max_symbols_per_word": 99,
        "max_bullet_lines": 1,
        "max_ellipsis_lines": 1,
        "min_alphabetic_words": 0,
        "min_stop_words": 0,
    },
    filters.gopher_repetition: {
        "max_duplicate_lines": 1,
        "max_duplicate_paragraphs": 1,
        "max_duplicate_line_characters": 1,
        "max_duplicate_paragraph_characters": 1,
        "max_top_n_grams": (),
        "max_duplicate_n_grams": (),
    },
    filters.fineweb: {
        "min_punctuated_lines": -1,
        "max_duplicate_line_characters": 9,
        "max_short_lines": 9,
        "short_line_characters": 3,
    },
    filters.c4: {"min_sentences": 0},
}
QUALITY, REPETITION, FINEWEB, C4 = NO_LIMITS


@pytest.mark.parametrize(
    ("rules", "text", "option", "kept", "dropped"),
    [
        (QUALITY, "a b c", "min_words", 3, 4),
        (QUALITY, "a b c", "max_words", 3, 2),
        (QUALITY, "a bbb", "min_mean_word_length", 2, 2.1),
        (QUALITY, "a bbb", "max_mean_word_length", 2, 1.9),
        (QUALITY, "# b c# d e", "max_symbols_per_word", 0.4, 0.39),
        (QUALITY, "a... b… c d #", "max_symbols_per_word", 0.4, 0.39),
        (QUALITY, "- a\n\n • b\nc -", "max_bullet_lines", 2 / 3, 0.6),
        (QUALITY, "a...\nb… \n\n...c", "max_ellipsis_lines", 2 / 3, 0.6),
        (QUALITY, "a 1 b2 3", "min_alphabetic_words", 0.5, 0.6),
        (QUALITY, 'The "of", x the', "min_stop_words", 2, 3),
        (REPETITION, "a\n\nb\na \ncc", "max_duplicate_lines", 0.25, 0.24),
        (REPETITION, "a\n\nb\na \ncc", "max_duplicate_line_characters", 0.2, 0.19),
        (REPETITION, "a\nb\n\nc\n\na\nb", "max_duplicate_paragraphs", 1 / 3, 0.33),
        (REPETITION, "a\nb\n\nc\n\na\nb", "max_duplicate_paragraph_characters", 3 / 7, 0.42),
        (REPETITION, "a b c a b d", "max_top_n_grams", [4 / 6], [0.66]),
        (REPETITION, "a b c d a b c d", "max_top_n_grams", [1, 0.75], [1, 0.74]),
        (REPETITION, "a b c d e a b c d e x", "max_duplicate_n_grams", [5 / 11], [0.45]),
        (FINEWEB, "a.\n\nb\nc", "min_punctuated_lines", 0.33, 1 / 3),
        (FINEWEB, "aa\naa \n\nbbb", "max_duplicate_line_characters", 0.29, 2 / 7),
        (FINEWEB, "aa\nbbb\ncccc", "max_short_lines", 0.34, 1 / 3),
        (C4, 'One. Two! "Three?"', "min_sentences", 3, 4),
    ],
)
def test_a_text_is_kept_up_to_each_limit(rules, text, option, kept, dropped):
    options = NO_LIMITS[rules]
    assert rules(view(text), **{**options, option: kept}) is None
    assert rules(view(text), **{**options, option: dropped}) is not None


def words(count, seed=0):
    draw = random.Random(seed)
    return " ".join("".join(draw.choices("abcdefgh", k=6)) for _ in range(count))


@pytest.mark.parametrize(
    "text, options, reason",
    [
        ("\n".join([*"abcdef", *"aaaa", words(100)]), {}, "0.3 of the lines"),
        ("\n".join([words(9), words(9), *"abc"]), {}, "in repeated lines"),
        (
            "\n\n".join(["a", "b", *["c\nd"] * 3, words(50)]),
            {"max_duplicate_lines": 1.0},
            "0.3 of the paragraphs",
        ),
        ("see here " * 10 + words(20), {}, "one 2-gram"),
        (words(25) + " x " + words(6), {"max_top_n_grams": []}, "repeated 5-grams"),
    ],
    ids=lambda value: str(value)[-20:],
)
def test_each_rule_of_gophers_repetition_has_its_reason(text, options, reason):
    assert reason in filters.gopher_repetition(view(text), **options)


def test_the_limits_of_repetition_are_those_of_the_paper():
    """Table A1 of arXiv 2112.11446."""
    assert filters.gopher_repetition(view("a text")) is None
    parameters = inspect.signature(filters.gopher_repetition).parameters
    assert {name: one.default for name, one in list(parameters.items())[1:]} == {
        "max_duplicate_lines": 0.3,
        "max_duplicate_paragraphs": 0.3,
        "max_duplicate_line_characters": 0.2,
        "max_duplicate_paragraph_characters": 0.2,
        "max_top_n_grams": (0.20, 0.18, 0.16),
        "max_duplicate_n_grams": (0.15, 0.14, 0.13, 0.12, 0.11, 0.10),
    }


@given(st.lists(st.sampled_from(["a", "bb", "ccc"]), min_size=1, max_size=30))
def test_n_grams_are_counted_as_by_hand(sequence):
    length = len("".join(sequence))
    for n, top, before in filters.repeated_n_grams(sequence, 6):
        grams = [tuple(sequence[at : at + n]) for at in range(len(sequence) - n + 1)]
        most = max(map(grams.count, grams))
        assert (
            top
            == max(most * len("".join(gram)) for gram in grams if grams.count(gram) == most)
            / length
        )
        inside = {at + i for at, gram in enumerate(grams) if gram in grams[:at] for i in range(n)}
        assert before == sum(len(sequence[at]) for at in inside) / length


@pytest.mark.parametrize(
    "more, options, reason",
    [
        (" Lorem Ipsum dolor.", {}, "lorem ipsum"),
        (" f() { return; }", {}, "curly bracket"),
        (" A Darned day.", {"bad_words": ["darned"]}, "bad word"),
        ("", {"min_sentences": 9}, "fewer than 9 sentences"),
    ],
)
def test_each_rule_of_c4_has_its_reason(more, options, reason):
    page = 'It was late. "Who is there?" she asked. Nobody answered!'
    assert filters.c4(view(page)) is None and reason in filters.c4(view(page + more), **options)


def prose(count, end="."):
    return [f"This line number {number} is long enough to be prose{end}" for number in range(count)]


@pytest.mark.parametrize(
    "lines, reason",
    [
        (prose(88, "") + prose(12), "at most 0.12 of the lines"),
        ([*prose(8), prose(1)[0]], "at least 0.1 of the characters"),
        (prose(33) + [f"Short {number}." for number in range(67)], "at least 0.67 of the lines"),
    ],
)
def test_each_rule_of_fineweb_has_its_reason_at_its_published_limit(lines, reason):
    assert reason in filters.fineweb(view("\n".join(lines)))


def test_pattern_drops_and_requires():
    assert filters.pattern(view("text"), require=r"\d") == r"does not match \d"
    assert filters.pattern(view("text 1"), drop="x{2}", require=r"\d") is None


def test_a_sample_has_its_share_and_is_part_of_a_larger_one():
    def sample(share):
        return {
            n
            for n in range(2000)
            if filters.keep_share(view(f"document {n}"), share=share, seed=0) is None
        }

    assert 0.16 < len(sample(0.2)) / 2000 < 0.24
    assert sample(0.2) < sample(0.5) < sample(1.0) == set(range(2000))


def test_only_the_languages_asked_for_are_kept():
    english = view("The cat sat on the mat, and nobody knew what it was thinking about.")
    german = view("Die Katze saß auf der Matte, und niemand wusste, woran sie dachte.")
    assert (
        filters.language(english, keep=["en"])
        is filters.language(german, keep=["en", "de"])
        is None
    )
    assert filters.language(german, keep=["en"]) == "language is de"


@pytest.mark.parametrize(
    ("check", "options", "named"),
    [
        (filters.pattern, {}, "`drop` or `require`"),
        (filters.pattern, {"drop": "(a"}, r"`\(a` is not a regular expression"),
        (filters.pattern, {"require": "[a"}, r"`\[a` is not a regular expression"),
        (filters.keep_share, {"share": 0}, "at most 1, got 0"),
        (filters.keep_share, {"share": 1.01}, "at most 1, got 1.01"),
        (filters.language, {"keep": ["de", "xx"]}, "unknown language `xx`.* Known: ace, af, am"),
    ],
)
def test_an_option_that_makes_no_sense_is_a_mistake_in_the_recipe(check, options, named):
    with pytest.raises(RecipeError, match=named):
        check(view("a text"), **options)


def test_words_are_counted_only_if_they_matter():
    assert filters.length(view("a b c"), max_words=3) is None
    assert filters.length(view("a b c d"), max_words=3) == "more than 3 words"
    assert filters.length(view("a b"), min_words=3, max_words=5) == "fewer than 3 words"
    assert filters.length(view("a b c"), min_words=3, max_words=3) is None
    assert filters.length(view("abc"), min_characters=3, max_characters=3) is None
    assert filters.length(view("abc"), min_characters=4) == "shorter than 4 characters"
    assert filters.length(view("abc"), max_characters=2) == "longer than 2 characters"
    assert filters.length(view("abc"), min_words=2) == "fewer than 2 words"
    assert filters.length(view("")) is None


# What parts return


def sifted(text, *, transforms=(), checks=()):
    document = Document(text, Origin("a.jsonl", "item"), 3)
    return list(filters.sift(document, "the source", transforms, checks))


def halves(document, *, drops=False):
    words = document["text"].split()
    return [] if drops else [{**document, "text": word} for word in words]


def test_transforms_may_return_several_documents_or_none_and_filters_see_each():
    def check(document):
        return f"{document['source']}, {document['where']}" if document["text"] == "b" else None

    found = sifted("a b c", transforms=[halves, halves], checks=[check])
    assert found == [("a", None), ("b", "the source, a.jsonl: item 3"), ("c", None)]
    reason = "the transform halves returned an empty list"
    assert sifted("a b", transforms=[partial(halves, drops=True), halves]) == [("a b", reason)]
    assert sifted(" \n") == sifted(" \n", checks=[check]) == [(" \n", "empty")]
    assert sifted("a") == [("a", None)]


@pytest.mark.parametrize(
    "returned", ["a text", None, 3, {"text": "a"}, [{"text": "a"}], {"text": 3}]
)
def test_a_transform_that_returns_no_document_is_named(returned):
    def change(document):
        return {**document, **returned} if returned == {"text": 3} else returned

    with pytest.raises(RecipeError, match="the transform change returned .* the document, changed"):
        sifted("a", transforms=[partial(change)])


@pytest.mark.parametrize("returned", [True, "", ["reason"], 0])
def test_a_filter_that_returns_no_reason_is_named(returned):
    def check(document):
        return returned

    with pytest.raises(RecipeError, match="the filter check returned .* or None to keep"):
        sifted("a", checks=[partial(check)])


def test_a_view_of_a_document_is_a_mapping():
    seen = filters.View(Document("a", Origin("a.jsonl", "item"), 5), "s")
    assert len(seen) == 3
    assert dict(seen) == {"text": "a", "source": "s", "where": "a.jsonl: item 5"}


# Names of stored tokens


def test_names_of_tokens_stored_before_there_were_versions_are_the_same():
    transforms = {"data.transforms": [Component(name="normalise")]}
    listed = [Component(name="length", min_words=3), Component(name="gopher_quality")]
    code = filters.Sieve(transforms, {"data.filters": listed}).code()
    assert key_of(code) == "e665904c7337a78ccb70b604aa7d0668"


RESULTS = {  # name -> version, digest of the results for TEXTS
    "length": (1, "f4051737"),
    "pattern": (1, "56cbb2ec"),
    "keep_share": (1, "18d63ab3"),
    "language": (1, "57439228"),
    "c4": (1, "5afb76d2"),
    "gopher_quality": (1, "fab625ca"),
    "gopher_repetition": (1, "48ada1f3"),
    "fineweb": (1, "488f1dac"),
    "decontaminate": (2, "2a5ae138"),
    "normalise": (1, "14251628"),
    "c4_lines": (1, "1437a488"),
    "drop_lines": (1, "ef30c9e8"),
}
OPTIONS = {
    "length": {"min_words": 4, "max_characters": 900},
    "pattern": {"drop": "lorem", "require": "[a-z]"},
    "keep_share": {"share": 0.4},
    "language": {"keep": ["en"]},
    "drop_lines": {"lines": ["- a list", "Lorem ipsum dolor."]},
}


@pytest.fixture(scope="module")
def texts():
    sentences = [*prose(12), "Lorem ipsum dolor.", "- a list", "x = {1: 2}", "Où est l\u2019été ?"]
    draw = random.Random(0)
    made = ["\n".join(draw.choices(sentences, k=draw.randrange(1, 30))) for _ in range(60)]
    return ["", "a\u0301 \r\nb\t", PROSE, words(60), *made]


@pytest.mark.parametrize("name", filters.VERSIONS)
def test_a_built_in_with_other_results_has_another_version(name, texts, tmp_path):
    """After a change: raise the version in `VERSIONS`, and write both here. Stored tokens are then made again."""
    (tmp_path / "exam.txt").write_text(texts[3])
    options = {**OPTIONS, "decontaminate": {"against": [str(tmp_path / "exam.txt")]}}
    built_in = {**filters.BUILT_IN["filter"], **filters.BUILT_IN["transform"]}[name]
    results = [built_in(view(text), **options.get(name, {})) for text in texts]
    assert (filters.VERSIONS[name], key_of({"results": results})[:8]) == RESULTS[name]


# Parts of the user's own


FAILS_AT_ELEVEN = """
def check(document, *, limit=10):
    if document["text"].endswith("number 11."):
        raise KeyError("no such word")

def change(document):
    check(document)
    return document

def score(text):
    check({"text": text})
    return 1.0

def rows():
    for number in range(20):
        check({"text": f"number {number}."})
        yield f"number {number}."
"""


@pytest.mark.parametrize(
    ("section", "kind", "workers"),
    [
        ({"filters": [{"name": "my_failing_parts:check"}]}, "filter", "0"),
        pytest.param(
            {"filters": [{"name": "my_failing_parts:check"}]},
            "filter",
            "2",
            marks=pytest.mark.heavy,
        ),
        ({"transforms": [{"name": "my_failing_parts:change"}]}, "transform", "0"),
        ({"path": "my_failing_parts:rows"}, "source", "0"),
    ],
)
def test_an_error_of_a_users_part_names_it_with_file_and_row(
    tmp_path, monkeypatch, build, section, kind, workers
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CPT_WORKERS", workers)
    (tmp_path / "my_failing_parts.py").write_text(FAILS_AT_ELEVEN)
    write_documents(tmp_path / "a.jsonl", 20, seed=1)
    with pytest.raises(UserCodeError) as error:
        build(Source(**{"path": "a.jsonl", **section}))
    first = str(error.value).splitlines()[0]
    assert first.startswith(
        "my_failing_parts:rows: item 12: " if kind == "source" else "a.jsonl:12: "
    ), first
    assert kind in first and "my_failing_parts:" in first and "KeyError" in first
