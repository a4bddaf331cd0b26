import json

import pytest
from tiny_documents import CONTAINER, chapter, write_epub, write_zip
from typer.testing import CliRunner

from cpt.cli import application
from cpt.contrib.documents.charsets import codec_named, decode
from cpt.contrib.documents.convert import convert_epub, convert_html
from cpt.contrib.documents.errors import NotConverted
from cpt.contrib.documents.ingest import ingest
from cpt.errors import DataError

GERMAN = "Die Fähre fährt über den Fluß – „pünktlich“ um 8 € je Person."
RUSSIAN = "Расписание маленькой гавани проверяют дважды в день."
CZECH = "Příliš žluťoučký kůň úpěl ďábelské ódy u přístavu řeky."
POLISH = "Zażółć gęślą jaźń, rzekł kapitan portu i zapisał w księdze pływów."
JAPANESE = "港の時刻表は毎日二回、手で書き直されます。①番の船は㈱みなとの船です～。"
CODE = "def tide(level):  # уровень воды\n    return level * 0.3048  # в метрах\n"
TAIWANESE, CHINESE = (
    "港口的時刻表每天由渡輪船員手工核對兩次。碁銹裏",
    "港口的时刻表每天由渡轮船员手工核对两次。镕喆",
)


def page(head, text, encoding):
    html = (
        f"<!DOCTYPE html><html><head>{head}<title>t</title></head><body><p>{text}</p></body></html>"
    )
    return html.encode(encoding)


@pytest.mark.parametrize(
    "head, text, encoding",
    [
        ("<meta charset='big5'>", TAIWANESE, "big5hkscs"),
        ("<meta charset=gb18030>", CHINESE + "㐂", "gb18030"),
        ("<meta charset=gb2312>", CHINESE, "gbk"),
        ("<meta charset=GBK>", CHINESE + "㐂", "gb18030"),
        ("<meta charset=windows-31j>", JAPANESE, "cp932"),
        ("<meta charset=Shift_JIS>", JAPANESE, "cp932"),
        ("<meta charset=ks_c_5601-1987>", "똠방각하 펲시콜라", "cp949"),
        ("<meta charset=iso-8859-1>", GERMAN, "cp1252"),
        ("<meta charset=us-ascii>", GERMAN, "cp1252"),
        ("<meta charset=iso-8859-9>", "İstanbul’da “güneşli” günler", "cp1254"),
        (
            "<meta http-equiv=Content-Type content='text/html; charset=windows-1251'>",
            RUSSIAN,
            "cp1251",
        ),
        (
            "<meta content='text/html;charset=\"koi8-r\"' http-equiv=content-type>",
            RUSSIAN,
            "koi8-r",
        ),
        ("<META\nCHARSET = ' cp1251 ' />", RUSSIAN, "cp1251"),
        ("<meta charset=unknown-9><meta charset=latin2>", CZECH, "iso8859-2"),
        ("<meta charset=utf-16>", GERMAN, "utf-8"),
        ("<meta charset=utf-16le>", RUSSIAN, "utf-8"),
        ("<script src=x.js charset=iso-8859-1></script><meta charset=utf-8>", GERMAN, "utf-8"),
        ("<link rel=stylesheet href=x.css charset=iso-8859-1>", GERMAN, "utf-8"),
        ("<meta name=description content='charset=koi8-r'>", GERMAN, "utf-8"),
        ("<!-- <meta charset=koi8-r> -->", GERMAN, "utf-8"),
        ("<!--><meta charset=cp1251>", RUSSIAN, "cp1251"),
        ("<meta name=x content='<meta charset=koi8-r>'>", GERMAN, "utf-8"),
        ("<script>'<meta charset=koi8-r>'</script>", GERMAN, "utf-8"),
        (f"<style>{'a{b:c}' * 300}</style><meta charset=iso-8859-2>", GERMAN, "utf-8"),
        (f"<style>{'a{b:c}' * 300}</style><meta charset=iso-8859-2>", CZECH, "iso8859-2"),
    ],
)
def test_a_page_is_decoded_as_browsers_do(head, text, encoding):
    assert convert_html(page(head, text, encoding)).text == text


@pytest.mark.parametrize(
    "label, raw, text",
    [
        ("euc-jp", b"\xad\xa1\xc8\xd6\x8e\xb1\xad\xea\xfc\xe2", "①番ｱ㈱髙"),
        ("iso-2022-jp", b"\x1b$B-!HV\x1b(B a", "①番 a"),
        ("gb2312", b"5 \x80\xd4\xaa", "5 €元"),
    ],
)
def test_characters_that_only_vendors_have_are_read(label, raw, text):
    html = page(f"<meta charset={label}>", "@", "ascii").replace(b"@", raw)
    assert convert_html(html).text == text


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_an_xml_declaration_in_utf_16_needs_no_mark(encoding):
    declared = "<?xml version='1.0' encoding='utf-16'?>"
    assert convert_html((declared + page("", RUSSIAN, "utf-8").decode()).encode(encoding)).text


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_a_byte_order_mark_wins_over_a_declaration(encoding):
    assert convert_html(page("<meta charset=koi8-r>", GERMAN, encoding)).text == GERMAN


def test_an_xml_declaration_counts_in_pages_and_wins_in_books(tmp_path):
    declared = '<?xml version="1.0" encoding="windows-1251"?>'
    assert convert_html(declared.encode() + page("", RUSSIAN, "cp1251")).text == RUSSIAN
    body = declared + chapter(f"<p>{RUSSIAN}</p>").replace('<?xml version="1.0"?>', "").replace(
        "<head>", "<head><meta charset='koi8-r'/>"
    )
    book = write_epub(tmp_path / "a.epub", {"1.xhtml": body.encode("cp1251")})
    assert convert_epub(book.read_bytes()).text == RUSSIAN


def test_a_book_without_an_xml_declaration_is_utf_8_whatever_its_meta_declares(tmp_path):
    body = chapter(f"<p>{CZECH}</p>").removeprefix('<?xml version="1.0"?>')
    body = body.replace("<head>", "<head><meta charset='windows-1250'/>")
    for encoding in ("utf-8", "cp1250"):
        book = write_epub(tmp_path / "a.epub", {"1.xhtml": body.encode(encoding)})
        assert convert_epub(book.read_bytes()).text == CZECH


def test_the_package_of_a_book_may_have_any_encoding(tmp_path):
    declared = '<?xml version="1.0" encoding="gb2312"?>'
    package = (
        f"{declared}<package><title>{CHINESE}</title><manifest><item id='a' href='1.xhtml' media-type='text/html'/>"
        "</manifest><spine><itemref idref='a'/></spine></package>"
    )
    files = {
        "META-INF/container.xml": CONTAINER.format("a.opf"),
        "a.opf": package.encode("gbk"),
        "1.xhtml": chapter("text"),
    }
    book = convert_epub(write_zip(tmp_path / "a.epub", files).read_bytes())
    assert (book.title, book.text) == (CHINESE, "text")


def test_an_encoding_that_browsers_refuse_is_refused():
    with pytest.raises(NotConverted, match="iso-2022-kr"):
        convert_html(page("<meta charset=iso-2022-kr>", "text", "ascii"))


@pytest.mark.parametrize(
    "line, encoding",
    [
        ("# -*- coding: cp1251 -*-", "cp1251"),
        ("# vim: set fileencoding=koi8-r :", "koi8-r"),
        ("# -*- coding: koi8-r-unix -*-", "koi8-r"),
        ("\ufeff", "utf-16-le"),
    ],
)
def test_a_text_may_declare_its_encoding(line, encoding):
    decoded = decode(f"{line}\n{RUSSIAN}".encode(encoding), "txt")
    assert decoded.text.endswith(RUSSIAN)


@pytest.mark.parametrize(
    "raw",
    [
        CZECH.encode("iso8859-2"),
        CZECH.encode("cp1250"),
        CODE.encode("cp1251"),
        RUSSIAN.encode("koi8-r"),
        JAPANESE.encode("cp932"),
        "ä\nb, in latin-1".encode("latin-1"),
        "naïve “windows”".encode("cp1252"),
        "déjà vu à côté".encode("cp1252"),
    ],
)
def test_a_text_without_a_declaration_is_refused(raw):
    with pytest.raises(NotConverted, match="unknown encoding") as raised:
        decode(raw, "txt")
    assert "--encoding" in raised.value.detail


def test_a_damaged_byte_in_utf_8_is_counted_and_the_rest_is_kept():
    decoded = decode((GERMAN * 2).encode() + b"\xdf", "txt")
    assert decoded.text == GERMAN * 2 + "\ufffd"
    assert (decoded.encoding, decoded.num_replaced) == ("utf-8", 1)


@pytest.mark.parametrize(
    "name, encoding, text",
    [("latin-1", "cp1252", GERMAN), ("euc_kr", "cp949", "똠방각하"), ("gb2312", "gbk", CHINESE)],
)
def test_a_name_means_what_browsers_mean_by_it(name, encoding, text):
    assert decode(text.encode(encoding), "txt", codec_named(name)).text == text
    assert decode(
        f"# coding: -*- coding: {name} -*-\n{text}".encode(encoding), "txt"
    ).text.endswith(text)


def test_utf_16_without_a_mark_is_read_if_it_is_named():
    assert decode(RUSSIAN.encode("utf-16-le"), "txt", codec_named("utf-16-le")).text == RUSSIAN


@pytest.mark.heavy
def test_the_given_encoding_is_that_of_files_without_one(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "bare.txt").write_bytes(CZECH.encode("iso8859-2"))
    (folder / "declared.html").write_bytes(page("<meta charset=cp1251>", RUSSIAN, "cp1251"))
    (folder / "utf8.txt").write_bytes(GERMAN.encode())

    def rows(output, **options):
        done = ingest([folder], tmp_path / output, **options)
        lines = (tmp_path / output / "documents-00000.jsonl").read_text().splitlines()
        return done, {line["path"].rpartition("/")[2]: line for line in map(json.loads, lines)}

    done, found = rows("refused")
    assert [entry.reason for entry in done.failed] == ["unknown encoding"]
    assert "encoding" not in found["utf8.txt"] and "bare.txt" not in found
    done, found = rows("given", encoding="latin2")
    assert not done.failed
    assert found["bare.txt"]["text"] == CZECH and found["declared.html"]["text"] == RUSSIAN
    with pytest.raises(DataError, match="unknown encoding"):
        ingest([folder], tmp_path / "no", encoding="latin-99")


@pytest.mark.heavy
def test_the_command_takes_the_encoding(tmp_path):
    (tmp_path / "a.txt").write_bytes(CODE.encode("cp1251"))

    def run(output, *options):
        words = [
            "data",
            "ingest",
            str(tmp_path / "a.txt"),
            "--output",
            str(tmp_path / output),
            *options,
        ]
        return CliRunner().invoke(application(), words).exit_code

    assert run("refused") == 2
    assert run("given", "--encoding", "cp1251") == 0
    rows = (tmp_path / "given/documents-00000.jsonl").read_text().splitlines()
    assert json.loads(rows[0])["text"] == CODE
