from cpt.documents.converted import Converted, NotConverted


def test_why_a_file_gives_no_document_is_kept_in_short_and_in_full():
    assert (NotConverted("no text, a scan?").reason, NotConverted("no text, a scan?").detail) == ("no text, a scan?",) * 2
    assert NotConverted("damaged", "byte 7").detail == "byte 7"


def test_a_document_may_have_no_title_and_no_pages():
    assert (Converted("text").title, Converted("text").pages) == (None, None)
