"""Open zip files and XML that strangers made: nothing unpacks to more than a limit, and no entity is expanded or fetched."""

import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

from lxml import etree

from cpt.documents.converted import NotConverted

MAX_UNPACKED_BYTES = 512 * 2**20
ENCRYPTED = 1  # bit of a member's flags


def open_archive(path: Path) -> zipfile.ZipFile:
    """The zip file.

    Raises:
        NotConverted: it is damaged.
    """
    try:
        return zipfile.ZipFile(path)
    except (zipfile.BadZipFile, NotImplementedError, ValueError) as problem:
        raise NotConverted("damaged zip", str(problem)) from problem


def refuse_bombs(archive: zipfile.ZipFile, is_read: Callable[[str], bool] = lambda name: True) -> None:
    """Stop before anything is unpacked. The sizes that the file states bind: zipfile reads no more of a member than it states.

    Args:
        is_read: tells by a member's name whether it is going to be read.

    Raises:
        NotConverted: what is read is too large, or has a password.
    """
    members = [member for member in archive.infolist() if is_read(member.filename)]
    if any(member.flag_bits & ENCRYPTED for member in members):
        raise NotConverted("encrypted", "the zip file has a password")
    num_bytes = sum(member.file_size for member in members)
    if num_bytes > MAX_UNPACKED_BYTES:
        limit = MAX_UNPACKED_BYTES // 2**20
        raise NotConverted("too large when unpacked", f"{num_bytes:,} bytes, the limit is {limit} MiB. Is it a zip bomb?")


def read_member(archive: zipfile.ZipFile, name: str) -> bytes:
    """A member's content.

    Raises:
        NotConverted: it is not there, or damaged.
    """
    try:
        return archive.read(name)
    except KeyError as problem:
        raise NotConverted("damaged", f"it holds no `{name}`") from problem
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, NotImplementedError, RuntimeError) as problem:
        raise NotConverted("damaged zip", f"{name}: {problem}") from problem


def parse_xml(raw: bytes | str, name: str) -> etree._Element:
    """The root of an XML document; entities of its own stay what they are.

    Raises:
        NotConverted: it is not well formed.
    """
    parser = etree.XMLParser(
        resolve_entities=False, no_network=True, load_dtd=False, huge_tree=False, remove_comments=True, remove_pis=True
    )
    try:
        return etree.fromstring(raw, parser)
    except (etree.XMLSyntaxError, ValueError) as problem:
        raise NotConverted("damaged XML", f"{name}: {problem}") from problem
