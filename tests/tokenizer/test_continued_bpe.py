from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from cpt.tokenizer.extend_vocabulary import MAX_TOKEN_CHARACTERS, join_in, learn_merges

LETTERS = dict(enumerate("abcd"))


def learn(words, counts, number, forbidden=(), may_be_token=lambda token: True):
    return learn_merges(words, counts, LETTERS, number, 4, forbidden, may_be_token)


def test_forbidden_and_unwanted_strings_are_passed_over():
    assert [
        one.token for one in learn([[0, 1], [2, 3], [1, 2]], [4, 3, 2], 9, {"ab"}, lambda token: token != "cd")
    ] == ["bc"]


def test_tokens_do_not_grow_without_end():
    tokens = [one.token for one in learn([[0] * 200], [50], 100)]
    assert max(map(len, tokens)) <= MAX_TOKEN_CHARACTERS


words_and_counts = st.lists(
    st.tuples(st.lists(st.integers(0, 3), min_size=2, max_size=9), st.integers(1, 20)), min_size=1, max_size=12
)


@given(words_and_counts)
def test_the_merges_are_those_of_counting_anew_after_each(found):
    words, counts = [word for word, _ in found], [count for _, count in found]
    expected, tokens, current = [], dict(LETTERS), words
    for number in range(4, 12):
        pairs = Counter()
        for word, count in zip(current, counts, strict=True):
            for pair in zip(word, word[1:], strict=False):
                pairs[pair] += count
        allowed = {
            pair: n for pair, n in pairs.items() if n > 1 and tokens[pair[0]] + tokens[pair[1]] not in tokens.values()
        }
        if not allowed:
            break
        best = min(allowed, key=lambda pair: (-allowed[pair], pair))
        expected.append((best, allowed[best]))
        tokens[number] = tokens[best[0]] + tokens[best[1]]
        current = [join_in(word, best, number) for word in current]
    merges = learn(words, counts, 8, LETTERS.values())
    assert [((one.left, one.right), one.count) for one in merges] == expected
