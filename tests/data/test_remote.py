import io
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import aiohttp
import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cpt.data.readers import opening
from cpt.data.readers.opening import RemoteFile, persistently
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


def test_requests_end_at_the_stop_of_a_piece_and_are_small_behind_it():
    content = bytes(range(256)) * 1024
    fsspec.filesystem("memory").pipe("/requests/a.bin", content)
    with RemoteFile("memory://requests/a.bin", 10, 30) as file:
        requests = [file.read(2**20) for _ in range(3)]
        assert [len(request) for request in requests] == [20, 2**16, 2**16]
        assert b"".join(requests) == content[10 : 30 + 2**17]
        assert (file.seek(-5, io.SEEK_END), file.read(99)) == (2**18 - 5, content[-5:])
        assert (file.seek(-9, io.SEEK_CUR), file.read(4)) == (2**18 - 9, content[-9:-5])
        assert (file.seek(2**18 + 5), file.read(9)) == (2**18 + 5, b"")
    with RemoteFile("memory://requests/a.bin", 10) as file:
        assert file.read(2**20) == content[10:]


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


def answer(status):
    """What aiohttp raises for an answer with this status."""
    return aiohttp.ClientResponseError(None, (), status=status, message=f"answer {status}")


def caused_by(cause):
    problem = OSError("of fsspec")
    problem.__cause__ = cause
    return problem


@pytest.mark.parametrize(
    ("problems", "waits", "outcome"),
    [
        ([], [], "done"),
        (
            [answer(503), caused_by(answer(429)), aiohttp.ClientConnectionError()],
            [0.5, 1, 2],
            "done",
        ),
        ([answer(408), answer(425), answer(500)], [0.5, 1, 2], "done"),
        ([answer(404)], [], FileNotFoundError(2, "no such file")),
        ([caused_by(answer(410))], [], FileNotFoundError(2, "no such file")),
        ([answer(403)], [], OSError("403 answer 403")),
        ([answer(499)], [], OSError("499 answer 499")),
        ([answer(500)] * 5, [0.5, 1, 2, 4], OSError("5 requests failed: 500 answer 500")),
        ([TimeoutError()] * 5, [0.5, 1, 2, 4], OSError("5 requests failed: TimeoutError")),
        ([OSError("reset")] * 4, [0.5, 1, 2, 4], "done"),
    ],
)
def test_a_busy_server_is_asked_again_after_longer_and_longer_waits(
    monkeypatch, problems, waits, outcome
):
    waited, left = [], list(problems)
    monkeypatch.setattr(opening.time, "sleep", waited.append)

    def request():
        if left:
            raise left.pop(0)
        return "done"

    try:
        found = persistently(request)
    except OSError as problem:
        found = problem
    assert waited == waits and left == []
    assert (type(found), str(found)) == (type(outcome), str(outcome))


def test_a_stream_without_seeking_is_held_in_memory_and_errors_of_the_hub_are_oserrors():
    memory = fsspec.filesystem("memory")
    memory.pipe("/stream/a.bin", b"0123456789")

    class Stream(io.BytesIO):
        def seek(self, *_):
            raise ValueError("Cannot seek streaming HTTP file")

    file = RemoteFile("memory://stream/a.bin")
    file._file = Stream()
    assert file.seek(-4, io.SEEK_END) == 6 and file.read(3) == b"678" and file.tell() == 9

    httpx = type("ConnectError", (Exception,), {"__module__": "httpx"})
    for problem, said in ((httpx("no route"), "no route"), (httpx(), "ConnectError")):
        with pytest.raises(OSError, match=f"^{said}$"):
            file.use(lambda _, problem=problem: (_ for _ in ()).throw(problem))
    with pytest.raises(KeyError):
        file.use(lambda _: {}["a"])
