import gzip


def test_a_document_file_keeps_its_text_to_the_byte(tmp_path, texts):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf one\r\n\n two \n")
    assert texts(tmp_path / "a.txt") == [" one\r\n\n two \n"]


def test_each_line_may_be_a_document(tmp_path, texts):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf one\r\n\n two \nlast")
    assert texts(tmp_path / "a.txt", text_documents="line") == [" one", " two ", "last"]


def test_documents_may_stand_between_separators(tmp_path, texts, bad):
    (tmp_path / "a.txt").write_text("one\nmore<|end|>two<|end|>\n")
    assert texts(tmp_path / "a.txt", text_documents="<|end|>") == ["one\nmore", "two"]
    (tmp_path / "a.txt").write_bytes(b"one--tw\xff--three")
    found = bad(tmp_path / "a.txt", text_documents="--")
    assert (found.where, found.byte, found.raw) == (f"{tmp_path}/a.txt: item 2", 7, b"tw\xff")


def test_a_document_file_that_is_no_text_is_refused(tmp_path, bad):
    (tmp_path / "a.txt").write_bytes(gzip.compress(b"text"))
    assert bad(tmp_path / "a.txt").detail == "invalid UTF-8 at byte 1 (0x8b)"
    (tmp_path / "b.md").write_bytes("text".encode("utf-16-be"))
    assert bad(tmp_path / "b.md").detail == "a NUL byte at byte 0: this is no text"
