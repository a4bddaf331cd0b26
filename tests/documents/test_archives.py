import zipfile

import pytest
from lxml import etree
from tiny_documents import write_zip

from cpt.documents import archives
from cpt.documents.archives import open_archive, parse_xml, read_member, refuse_bombs
from cpt.documents.converted import NotConverted

LAUGHS = "".join(f'<!ENTITY l{n} "{f"&l{n - 1};" * 10}">' for n in range(1, 9))
BILLION_LAUGHS = f'<?xml version="1.0"?><!DOCTYPE x [<!ENTITY l0 "ha">{LAUGHS}]><x>before &l8; after</x>'


def test_a_zip_bomb_is_refused_before_anything_is_unpacked(tmp_path, monkeypatch):
    monkeypatch.setattr(archives, "MAX_UNPACKED_BYTES", 10 * 2**20)
    path = write_zip(tmp_path / "a.zip", {"bomb": bytes(11 * 2**20), "image.png": b""})
    assert path.stat().st_size < 20_000
    with open_archive(path) as archive:
        refuse_bombs(archive, lambda name: name.endswith(".png"))
        with pytest.raises(NotConverted, match="too large when unpacked.*Is it a zip bomb"):
            refuse_bombs(archive)


def test_a_bomb_that_lies_about_its_size_gives_no_more_than_it_said(tmp_path):
    path = write_zip(tmp_path / "a.zip", {"bomb": bytes(2**20)})
    raw = path.read_bytes().replace((2**20).to_bytes(4, "little"), (100).to_bytes(4, "little"))
    path.write_bytes(raw)
    with open_archive(path) as archive, pytest.raises(NotConverted, match="damaged zip"):
        read_member(archive, "bomb")


def test_damage_is_told(tmp_path):
    path = write_zip(tmp_path / "a.zip", {"a.xml": "<a>" + "text " * 100 + "</a>"})
    raw = bytearray(path.read_bytes())
    raw[45] ^= 0xFF
    path.write_bytes(raw)
    with open_archive(path) as archive:
        with pytest.raises(NotConverted, match="damaged zip"):
            read_member(archive, "a.xml")
        with pytest.raises(NotConverted, match="it holds no `b.xml`"):
            read_member(archive, "b.xml")
    path.write_bytes(raw[:60])
    with pytest.raises(NotConverted, match="damaged zip"):
        open_archive(path)


def test_a_password_is_told(tmp_path):
    path = write_zip(tmp_path / "a.zip", {"a": "x"})
    with zipfile.ZipFile(path) as archive:
        archive.infolist()[0].flag_bits |= 1
        with pytest.raises(NotConverted, match="encrypted"):
            refuse_bombs(archive)


def test_entities_are_neither_expanded_nor_fetched(tmp_path):
    (tmp_path / "secret").write_text("secret")
    for entity in ('"expanded"', f'SYSTEM "file://{tmp_path}/secret"'):
        root = parse_xml(f"<!DOCTYPE x [<!ENTITY e {entity}>]><x>a&e;b</x>", "x")
        assert etree.tostring(root) == b"<x>a&e;b</x>"
    with pytest.raises(NotConverted, match="damaged XML.*amplification"):
        parse_xml(BILLION_LAUGHS, "x")


def test_bad_xml_is_told():
    with pytest.raises(NotConverted, match="damaged XML"):
        parse_xml("<a><b></a>", "x")
