import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cpt.data.readers.sources import files_of, pieces_of, read_piece, states_of
from cpt.recipe.schema import Source


class Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # which has each answer wait 40 ms

    def log_message(self, *_):
        pass

    def do_GET(self):
        server, status, headers = self.server, 200, {}
        content = server.files.get(self.path.lstrip("/"))
        if self.path == "/":
            content = "".join(f'<a href="{name}">{name}</a>' for name in server.files).encode()
        if content is None:
            status, content = 404, b""
        elif server.has_ranges and (
            asked := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        ):
            begin, last = int(asked[1]), min(int(asked[2] or len(content)), len(content) - 1)
            headers["Content-Range"] = f"bytes {begin}-{last}/{len(content)}"
            content, status = content[begin : last + 1], 206
        self.send_response(status)
        for name, value in {
            **headers,
            "Content-Length": len(content),
            "ETag": f'"{hash(content)}"',
        }.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    do_HEAD = do_GET  # noqa: N815


@pytest.fixture
def server():
    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        server.url = f"http://127.0.0.1:{server.server_port}"
        server.has_ranges, server.daemon_threads, server.files = True, True, {}
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield server
        server.shutdown()


def lines(count):
    return "".join(
        json.dumps({"text": f"line {number}"}) + "\n" for number in range(count)
    ).encode()


@pytest.mark.parametrize("has_ranges", [True, False])
@pytest.mark.parametrize("kind", ["jsonl", "parquet", "jsonl.gz"])
def test_a_file_behind_http_is_read_whether_the_server_has_ranges_or_not(
    server, tmp_path, has_ranges, kind
):
    server.has_ranges = has_ranges
    if kind == "parquet":
        table = pa.table({"text": [f"line {number}" for number in range(500)]})
        pq.write_table(table, tmp_path / "a", row_group_size=50)
        server.files["a.parquet"] = (tmp_path / "a").read_bytes()
    else:
        server.files[f"a.{kind}"] = (
            lines(500) if kind == "jsonl" else pa.compress(lines(500), "gzip", asbytes=True)
        )
    source = Source(path=f"{server.url}/a.{kind}")
    items = [
        item for piece in pieces_of(source, "k", 2000) for item in read_piece(source, piece, "k")
    ]
    assert [item.text for item in items] == [f"line {number}" for number in range(500)]


SIGNED = "X-Amz-Expires=9&part=2&X-Amz-Signature="


def test_a_renewed_signature_makes_no_new_store(server, tokenized):
    server.files |= {f"a.jsonl?{SIGNED}{number}": lines(5) for number in (1, 2)}
    server.files["a.jsonl?part=3&sig=1"] = lines(5)
    sources = [tokenized(Source(path=f"{server.url}/{name}")) for name in server.files]
    first, renewed, other = (source.shard_folder(0) for source in sources)
    assert first == renewed != other
    assert sources[0].states[0].name == f"{server.url}/a.jsonl?part=2"


def test_a_folder_behind_http_is_listed_with_sizes(server):
    server.files |= {"b.jsonl": lines(10), "a.jsonl": lines(5), "c.png": b"x"}
    assert [(file.name, file.size) for file in files_of(Source(path=server.url + "/"), "k")] == [
        (f"{server.url}/{name}", len(server.files[name])) for name in ("a.jsonl", "b.jsonl")
    ]
    before = states_of(Source(path=server.url + "/"), "k")
    server.files["a.jsonl"] = lines(5).upper()
    assert states_of(Source(path=server.url + "/"), "k")[0] != before[0]
