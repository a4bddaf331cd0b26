import io

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cpt.data.readers import text_formats as text_files

PARTS = st.lists(st.sampled_from([b"", b"a", b"-", b"--", b"---", b"ab-", b"long " * 5]), max_size=30)


@given(PARTS, st.integers(1, 9), st.booleans())
@settings(max_examples=200)
def test_parts_are_what_split_gives_wherever_the_buffer_ends(parts, buffer, bom):
    content = b"\xef\xbb\xbf" * bom + b"".join(parts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_files, "BUFFER", buffer)
        found = list(text_files.split(io.BytesIO(content), b"--"))
    assert [part for _, part in found] == content.removeprefix(b"\xef\xbb\xbf").split(b"--")
    assert all(content[at:].removeprefix(b"\xef\xbb\xbf").startswith(part) for at, part in found)


@given(st.lists(st.integers(0, 60), min_size=1, max_size=8), st.integers(1, 25))
@example([20, 0], 1)
def test_a_part_that_is_too_long_does_not_spoil_the_next(lengths, buffer):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"BUFFER": buffer, "LONGEST_LINE": 20}.items():
            patch.setattr(text_files, name, value)
        found = list(text_files.split(io.BytesIO(b"--".join(b"x" * length for length in lengths)), b"--"))
    assert [part for _, part in found] == [b"x" * length if length <= 20 else b"..." for length in lengths]
    assert [at for at, _ in found] == [sum(lengths[:number]) + 2 * number for number in range(len(lengths))]
