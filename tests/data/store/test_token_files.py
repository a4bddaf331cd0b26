import numpy as np
import pytest

from cpt.cache import publish_once
from cpt.data.store.token_files import StoredDocuments, TokenFiles, TokenWriter
from cpt.errors import DataError


def write_two_documents(folder):
    writer = TokenWriter(folder, np.dtype(np.uint16))
    writer.append(np.array([1, 2, 3], np.uint16), np.array([3]), np.array([2**64 - 1], np.uint64), np.array([5]))
    writer.append(np.array([4], np.uint16), np.array([1]), np.array([7], np.uint64), np.array([1]))
    writer.close({"empty": 2})


@pytest.fixture
def files(tmp_path):
    return TokenFiles(publish_once(tmp_path / "files", write_two_documents))


@pytest.fixture
def both(files):
    """The same two documents twice."""
    return StoredDocuments([files, files])


def test_documents_of_several_folders_are_counted_through(both):
    assert both.offsets.tolist() == [0, 3, 4, 7, 8] and len(both) == 4 and both.num_tokens == 8
    assert both.hashes.tolist() == [2**64 - 1, 7] * 2 and both.num_bytes.tolist() == [5, 1] * 2
    lengths = np.diff(both.offsets).tolist()
    assert [
        both.tokens(start, length).tolist() for start, length in zip(both.offsets[:-1].tolist(), lengths, strict=True)
    ] == [
        [1, 2, 3],
        [4],
    ] * 2
    assert both.tokens(5, 2).tolist() == [2, 3], "a piece of a document"


def test_the_segments_of_examples_are_stored_and_verified(tmp_path):
    writer = TokenWriter(tmp_path, np.dtype(np.uint16), segmented=True)
    nothing = np.zeros(2, np.uint64)
    writer.append(
        np.arange(5), np.array([2, 3]), nothing, nothing.astype(np.int64), None, np.array([0, 1, 0, 0, 2], np.uint8)
    )
    writer.close({})
    files = TokenFiles(tmp_path)
    documents = StoredDocuments([files])
    assert documents.are_examples and documents.segments(2, 3).tolist() == [0, 0, 2] and files.is_sound()
    (tmp_path / "segments.bin").write_bytes(b"\0" * 5)
    assert not TokenFiles(tmp_path).is_sound()
    (tmp_path / "segments.bin").unlink()
    with pytest.raises(DataError, match="damaged"):
        TokenFiles(tmp_path)
