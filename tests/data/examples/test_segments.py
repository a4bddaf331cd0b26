import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cpt.data.examples.segments import CONTEXT, LEARNED, LONG_PROMPT, NOTHING_LEARNED, UNWANTED, fitting
from cpt.data.store.token_files import StoredDocuments, TokenFiles, TokenWriter


def stored(folder, *parts):
    """Documents of these segments, one folder a part."""
    files = []
    for number, documents in enumerate(parts):
        path = folder / str(number)
        path.mkdir(parents=True, exist_ok=True)
        writer, lengths = (
            TokenWriter(path, np.dtype(np.uint16), segmented=True),
            np.array([len(one) for one in documents], np.int64),
        )
        segments, nothing = np.array([one for some in documents for one in some], np.uint8), np.zeros(len(documents))
        writer.append(
            segments.astype(np.uint16), lengths, nothing.astype(np.uint64), nothing.astype(np.int64), None, segments
        )
        writer.close({})
        files.append(TokenFiles(path))
    return StoredDocuments(files)


@given(
    documents=st.lists(st.lists(st.sampled_from([CONTEXT, LEARNED]), min_size=1, max_size=9), min_size=1, max_size=6),
    length=st.integers(1, 9),
)
def test_a_conversation_fits_that_has_something_to_learn_behind_its_first_token(tmp_path_factory, documents, length):
    half = len(documents) // 2
    all_documents = stored(
        tmp_path_factory.mktemp("a"), *[part for part in (documents[:half], documents[half:]) if part]
    )
    found = fitting(all_documents, np.arange(len(documents)), "conversation", length)
    expected = [number for number, one in enumerate(documents) if LEARNED in one[1:length]]
    assert found.numbers.tolist() == expected
    assert (
        found.lengths.tolist() == found.tokens.tolist() == [min(length, len(documents[number])) for number in expected]
    )
    left_out = len(documents) - len(expected)
    assert found.left_out == ({NOTHING_LEARNED: left_out} if left_out else {})


def test_a_prompt_leaves_room_for_a_completion(tmp_path):
    documents = stored(tmp_path, [[CONTEXT] * size + [LEARNED] * 5 + [UNWANTED] * 3 for size in (0, 3, 4, 9)])
    found = fitting(documents, np.array([0, 1, 2, 3]), "preference", 4)
    assert (
        found.numbers.tolist() == [0, 1] and found.lengths.tolist() == [8, 11] and found.left_out == {LONG_PROMPT: 2}
    )
    assert fitting(documents, np.array([1, 3]), "judged", 4).numbers.tolist() == [1], (
        "only the chosen ones are looked at"
    )
