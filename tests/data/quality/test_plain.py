from cpt.data.filters.built_in import keep_share, length, pattern


def view(text):
    return {"text": text, "source": "s", "where": "s.txt"}


def test_length_gives_the_reason():
    assert length(view("abc"), min_characters=4) == "shorter than 4 characters"
    assert length(view("abc"), max_characters=2) == "longer than 2 characters"
    assert length(view("abc"), min_characters=3, max_characters=3) is None


def test_pattern_drops_and_requires():
    assert pattern(view("see Lorem ipsum"), drop="[Ll]orem") == "matches [Ll]orem"
    assert pattern(view("text"), require=r"\d") == r"does not match \d"
    assert pattern(view("text 1"), drop="x{2}", require=r"\d") is None


def sample(share, seed=0):
    return {number for number in range(4000) if keep_share(view(f"document {number}"), share=share, seed=seed) is None}


def test_a_sample_has_its_share_and_is_part_of_a_larger_one():
    assert 0.17 < len(sample(0.2)) / 4000 < 0.23
    assert sample(0.2) < sample(0.5) < sample(1.0) == set(range(4000))
    assert keep_share(view("document"), share=1e-12) == "not in the sample of 1e-12"
