"""A Hub on this machine that models are pushed to, with as much HTTP as huggingface_hub asks for when it uploads a
folder."""

import base64
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN, READ_ONLY = "hf_may_write", "hf_may_read"
LARGE = 10_000  # such files go to large storage, by the LFS protocol


class ModelHub(ThreadingHTTPServer):
    """Attributes:
    private: name -> whether only its owner sees it.
    commits: name -> the files after each commit.
    blobs: what lies in large storage, by sha256.
    breaking: so many uploads to large storage end in the middle.
    asked: each request's method and path.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.forget()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def forget(self) -> None:
        """Be as empty as at first."""
        self.private: dict[str, bool] = {}
        self.commits: dict[str, list[dict[str, bytes]]] = {}
        self.blobs: dict[str, bytes] = {}
        self.breaking = 0
        self.asked: list[str] = []

    def files(self, name: str) -> dict[str, bytes]:
        """What the newest commit holds."""
        return self.commits[name][-1]

    def uploads(self) -> int:
        """Bodies that were sent to large storage."""
        return sum(line.startswith("PUT /storage/") for line in self.asked)


class Answer(BaseHTTPRequestHandler):
    """To one request."""

    server: ModelHub
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_: object) -> None:
        """Nothing."""

    def answer(self) -> None:
        """By method and path."""
        path = unquote(urlsplit(self.path).path)
        self.server.asked.append(f"{self.command} {path}")
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if path.startswith("/storage/"):
            self.store(path.removeprefix("/storage/"), body)
            return
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token not in (TOKEN, READ_ONLY):
            self.send({"error": "Invalid credentials in Authorization header"}, 401)
            return
        if path == "/api/whoami-v2":
            self.send({"name": "chemist", "orgs": [{"name": "lab"}], "auth": {"accessToken": {"role": "write"}}})
            return
        if token == READ_ONLY:
            self.send({"error": "You don't have the rights to do that"}, 403)
            return
        if path == "/api/validate-yaml":
            self.send({"errors": [], "warnings": []})
            return
        routes = (
            (r"/api/repos/create", self.create),
            (r"/api/models/([^/]+/[^/]+)/preupload/main", self.preupload),
            (r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", self.batch),
            (r"/api/models/([^/]+/[^/]+)/commit/main", self.commit),
            (r"/api/models/([^/]+/[^/]+)(?:/revision/main)?", self.about),
        )
        for pattern, route in routes:
            if found := re.fullmatch(pattern, path):
                route(body, *found.groups())
                return
        self.send({"error": "not found"}, 404)

    do_GET = do_POST = do_PUT = do_HEAD = answer  # noqa: N815

    def create(self, body: bytes) -> None:
        """A repository, or the answer that it is there."""
        asked = json.loads(body)
        name = f"{asked['organization']}/{asked['name']}"
        is_new = name not in self.server.private
        if is_new:
            self.server.private[name] = asked.get("private", False) or asked.get("visibility") == "private"
            self.server.commits[name] = [{".gitattributes": b"*.safetensors filter=lfs\n"}]
        self.send(
            {"url": f"{self.server.url}/{name}", "id": name} | ({} if is_new else {"error": "exists"}),
            200 if is_new else 409,
        )

    def about(self, _: bytes, name: str) -> None:
        """Whether it is private."""
        siblings = [{"rfilename": path} for path in self.server.files(name)]
        self.send(
            {"id": name, "private": self.server.private[name], "sha": self.commit_of(name), "siblings": siblings}
        )

    def preupload(self, body: bytes, _: str) -> None:
        """Which files go to large storage."""
        files = json.loads(body)["files"]
        modes = [
            {"path": f["path"], "uploadMode": "lfs" if f["size"] > LARGE else "regular", "shouldIgnore": False}
            for f in files
        ]
        self.send({"files": modes})

    def batch(self, body: bytes, _: str) -> None:
        """Where to send what is not there yet."""
        objects: list[dict[str, Any]] = []
        for one in json.loads(body)["objects"]:
            action = (
                {}
                if one["oid"] in self.server.blobs
                else {"actions": {"upload": {"href": f"{self.server.url}/storage/{one['oid']}"}}}
            )
            objects.append({"oid": one["oid"], "size": one["size"], **action})
        self.send({"transfer": "basic", "objects": objects})

    def store(self, oid: str, body: bytes) -> None:
        """Keep a large file's bytes."""
        if self.server.breaking > 0:
            self.server.breaking -= 1
            self.send({"error": "no room"}, 400)
            return
        self.server.blobs[oid] = body
        self.send({})

    def commit(self, body: bytes, name: str) -> None:
        """Small files come with it, large ones by their hash."""
        files = dict(self.server.files(name))
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.server.blobs[value["oid"]]
        self.server.commits[name].append(files)
        oid = self.commit_of(name)
        self.send({"commitUrl": f"{self.server.url}/{name}/commit/{oid}", "commitOid": oid})

    def commit_of(self, name: str) -> str:
        """A hash for each commit."""
        return hashlib.sha1(f"{name}{len(self.server.commits[name])}".encode()).hexdigest()

    def send(self, content: object, status: int = 200) -> None:
        """As JSON."""
        raw = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(raw)))
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(raw)
