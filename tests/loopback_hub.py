"""A Hub on this machine, with as much HTTP as huggingface_hub and `datasets` ask for, and a process that takes it for
the Hub."""

import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN = "hf_loopback"
LARGE = 100_000  # such files are kept outside git


class Hub(ThreadingHTTPServer):
    """`hub.commit("owner/name", {"a.jsonl": b"..."})` makes a commit of a dataset or of a model, and the
    branch `main` point to it.

    Attributes:
        private, gated: datasets that need TOKEN.
        failing: files whose next so many answers are 503.
        breaking: files whose next answer ends in the middle.
        sent: file -> bytes that were sent of it.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.commits: dict[str, dict[str, dict[str, bytes]]] = {}
        self.heads: dict[str, str] = {}
        self.private: set[str] = set()
        self.gated: set[str] = set()
        self.failing: dict[str, int] = {}
        self.breaking: set[str] = set()
        self.sent: dict[str, int] = {}
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def commit(self, dataset: str, files: dict[str, str | bytes]) -> str:
        """The commit's hash."""
        content = {
            name: data.encode() if isinstance(data, str) else data for name, data in files.items()
        }
        commit = hashlib.sha1(repr(sorted(content.items())).encode()).hexdigest()
        self.commits.setdefault(dataset, {})[commit] = content
        self.heads[dataset] = commit
        return commit

    def files(self, dataset: str, revision: str | None) -> dict[str, bytes] | None:
        """What a commit holds."""
        commit = self.heads.get(dataset) if revision in (None, "main") else revision
        return self.commits.get(dataset, {}).get(commit or "")


class Answer(BaseHTTPRequestHandler):
    """To one request."""

    server: Hub
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # which has each answer wait 40 ms

    def log_message(self, *_: object) -> None:
        """Nothing."""

    def do_GET(self) -> None:
        """Answer."""
        url = urlsplit(self.path)
        path, query = unquote(url.path), parse_qs(url.query)
        for pattern, answer in (
            (r"/api/(?:datasets|models)/([^/]+/[^/]+)(?:/revision/([^/]+))?", self.about),
            (r"/api/(?:datasets|models)/([^/]+/[^/]+)/tree/([^/]+)(?:/(.+))?", self.tree),
            (r"(?:/datasets)?/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", self.resolve),
        ):
            if found := re.fullmatch(pattern, path):
                if self.may_see(found[1]):
                    answer(query, *found.groups())
                return
        self.refuse(404, "")

    do_HEAD = do_GET  # noqa: N815

    def may_see(self, dataset: str) -> bool:
        """A private dataset is to others as one that is not there."""
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            if dataset in self.server.private or dataset not in self.server.commits:
                self.refuse(401, "RepoNotFound")
                return False
            if dataset in self.server.gated:
                self.refuse(403, "GatedRepo")
                return False
        return True

    def about(self, _: Any, dataset: str, revision: str | None) -> None:
        """The commit of a revision."""
        if (files := self.server.files(dataset, revision)) is None:
            self.refuse(
                404, "RevisionNotFound" if dataset in self.server.commits else "RepoNotFound"
            )
            return
        commit = self.server.heads[dataset] if revision in (None, "main") else revision
        self.send(
            {"id": dataset, "sha": commit, "siblings": [{"rfilename": name} for name in files]}
        )

    def tree(
        self, query: dict[str, list[str]], dataset: str, revision: str, folder: str | None
    ) -> None:
        """The files and folders of a folder."""
        is_recursive, below = query.get("recursive") == ["true"], f"{folder}/" if folder else ""
        found: dict[str, dict[str, Any]] = {}
        for name, content in (self.server.files(dataset, revision) or {}).items():
            if not name.startswith(below):
                continue
            *folders, _ = name.removeprefix(below).split("/")
            for depth in range(1, len(folders) + 1 if is_recursive else min(2, len(folders) + 1)):
                path = below + "/".join(folders[:depth])
                found[path] = {"type": "directory", "oid": "0" * 40, "size": 0, "path": path}
            if is_recursive or not folders:
                found[name] = {
                    "type": "file",
                    "oid": hashlib.sha1(content).hexdigest(),
                    "size": len(content),
                    "path": name,
                }
                if len(content) > LARGE:
                    found[name]["lfs"] = {
                        "oid": hashlib.sha256(content).hexdigest(),
                        "size": len(content),
                        "pointerSize": 134,
                    }
        if found:
            self.send(list(found.values()))
        else:
            self.refuse(404, "EntryNotFound")

    def resolve(self, _: Any, dataset: str, revision: str, name: str) -> None:
        """A file, or a range of its bytes."""
        content = (self.server.files(dataset, revision) or {}).get(name)
        if content is None:
            self.refuse(404, "EntryNotFound", {"X-Repo-Commit": revision})
            return
        if self.command == "GET" and self.server.failing.get(name, 0):
            self.server.failing[name] -= 1
            self.refuse(503, "")
            return
        headers = {
            "X-Repo-Commit": revision,
            "ETag": f'"{hashlib.sha1(content).hexdigest()}"',
            "Accept-Ranges": "bytes",
        }
        status = 200
        if asked := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            begin, last = int(asked[1]), min(int(asked[2] or len(content)), len(content) - 1)
            headers["Content-Range"] = f"bytes {begin}-{last}/{len(content)}"
            content, status = content[begin : last + 1], 206
        if self.command == "GET" and name in self.server.breaking:
            self.server.breaking.remove(name)
            self.close_connection = True
            headers["Content-Length"], content = str(len(content)), content[: len(content) // 2]
        if self.command == "GET":
            self.server.sent[name] = self.server.sent.get(name, 0) + len(content)
        self.send(content, headers, status)

    def refuse(self, status: int, code: str, headers: dict[str, str] | None = None) -> None:
        """As the Hub words it."""
        self.send({}, {"X-Error-Code": code, "X-Error-Message": code, **(headers or {})}, status)

    def send(
        self, content: object, headers: dict[str, str] | None = None, status: int = 200
    ) -> None:
        """Bytes as they are, all else as JSON."""
        raw = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(raw)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(raw)


WORKER = """
import json, os, sys
for line in sys.stdin:
    code, environment = json.loads(line)
    os.environ.update(environment)
    try:
        names = {}
        exec(code, names)
        answer = ["gave", names["result"]]
    except Exception as problem:
        answer = [type(problem).__name__, str(problem)]
    for name in environment:
        del os.environ[name]
    print("answer", json.dumps(answer), flush=True)
"""


class Client:
    """A process for which `hub` is the Hub: huggingface_hub reads its address when it is imported."""

    def __init__(self, hub: Hub, home: Path, **environment: str) -> None:
        kept = {
            name: value
            for name, value in os.environ.items()
            if name not in ("HF_HUB_OFFLINE", "HF_TOKEN")
        }
        here = {
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(home),
            "CPT_CACHE": str(home / "cpt"),
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        }
        command = [sys.executable, "-c", WORKER]
        self.process = subprocess.Popen(
            command,
            env={**kept, **here, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def __call__(self, code: str, **environment: str) -> Any:
        """What the code leaves in `result`; what it raises becomes a RuntimeError `DataError: message`."""
        self.process.stdin.write(json.dumps([code, environment]) + "\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("answer "):
                what, answer = json.loads(line.removeprefix("answer "))
                if what != "gave":
                    raise RuntimeError(f"{what}: {answer}")
                return answer
        raise AssertionError(f"the process ended with {self.process.wait()}")

    def close(self) -> None:
        """End the process; on a busy machine it takes a while to leave."""
        self.process.stdin.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
