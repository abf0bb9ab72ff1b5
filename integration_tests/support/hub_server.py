"""A small server of the Hub's endpoints on loopback, for a model, an adapter and a dataset: listing, files, uploads."""

import base64
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from loopback import served

COMMITS = {"main": "a" * 40, "v1": "b" * 40}
TOKEN = "hf_secret"


@dataclass
class Hub:
    """Served files, and the requests for them.

    Args:
        folders: The files of ``org/model`` by revision.
        private: Only with the token.
        cut_at: Bytes of the next download after which the connection ends; None: it does not.
        datasets: The files of the data set ``org/rows`` by revision.
        adapters: The files of ``org/adapter`` by revision.
        ranges: Whether a part of a file is sent to who asks for one; else the whole is.
    """

    folders: dict[str, Path]
    private: bool = False
    cut_at: int | None = None
    datasets: dict[str, Path] = field(default_factory=dict)
    adapters: dict[str, Path] = field(default_factory=dict)
    ranges: bool = True
    address: str = ""
    asked: list[tuple[str, str, str]] = field(default_factory=list)
    """Method, path and range of each request."""
    uploaded: dict[str, bytes] = field(default_factory=dict)
    deleted: list[str] = field(default_factory=list)
    created: list[str] = field(default_factory=list)

    def downloads(self, end: str) -> list[str]:
        """The ranges of the downloads of files that end so."""
        return [span for method, path, span in self.asked if method == "GET" and path.endswith(end)]


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """A block in which ``hub`` is served."""
    with served(Handler, hub=hub) as hub.address:
        yield hub


class Handler(BaseHTTPRequestHandler):
    hub: Hub

    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._get(body=False)

    def do_GET(self) -> None:
        self._get(body=True)

    def do_PUT(self) -> None:
        self.hub.uploaded[self.path.removeprefix("/lfs/")] = self._body()
        self._send(200, b"")

    def do_POST(self) -> None:
        body = self._body()
        if self.path == "/api/repos/create":
            self.hub.created.append(json.loads(body)["name"])
            self._json({"url": f"{self.hub.address}/org/model", "name": "org/model", "id": "org/model"})
        elif "/preupload/" in self.path:
            files = [
                {"path": f["path"], "uploadMode": _mode(f["path"]), "shouldIgnore": False}
                for f in json.loads(body)["files"]
            ]
            self._json({"files": files})
        elif "/paths-info/" in self.path:
            folder = self.hub.datasets[_revision(self.path.rpartition("/")[2]) or ""]
            wanted = parse_qs(body.decode())["paths"]
            self._json([_entry(folder / name, name) for name in wanted if (folder / name).is_file()])
        elif self.path.endswith("/info/lfs/objects/batch"):
            self._json(
                {"transfer": "basic", "objects": [_action(self.hub, o) for o in json.loads(body)["objects"]]}
            )
        elif "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "deletedFile":
                    self.hub.deleted.append(value["path"])
                if line["key"] == "file":
                    self.hub.uploaded[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    self.hub.uploaded[value["path"]] = self.hub.uploaded.pop(value["oid"])
            self._json(
                {
                    "commitUrl": f"{self.hub.address}/org/model/commit/{COMMITS['main']}",
                    "commitOid": COMMITS["main"],
                }
            )
        else:
            self._json({}, 200)

    def _body(self) -> bytes:
        self.hub.asked.append((self.command, self.path, ""))
        if self.headers.get("Transfer-Encoding") == "chunked":
            return b"".join(iter(self._chunk, b""))
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _chunk(self) -> bytes:
        size = int(self.rfile.readline(), 16)
        data = self.rfile.read(size)
        self.rfile.readline()
        return data

    def _get(self, *, body: bool) -> None:
        parts = urlsplit(self.path)
        path = unquote(parts.path)
        self.hub.asked.append((self.command, path, self.headers.get("Range", "")))
        if self.hub.private and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._send(401, b"", {"X-Error-Code": "RepoNotFound"})
        if path == "/api/whoami-v2":
            return self._json({"name": "somebody"}, 200 if self.headers.get("Authorization") else 401)
        for kind, name, folders in (
            ("models", "org/model", self.hub.folders),
            ("models", "org/adapter", self.hub.adapters),
            ("datasets", "org/rows", self.hub.datasets),
        ):
            files = f"/{name}/resolve/" if kind == "models" else f"/{kind}/{name}/resolve/"
            if path.startswith(f"/api/{kind}/{name}"):
                words = path.removeprefix(f"/api/{kind}/{name}").strip("/").split("/")
                return self._listing(folders, name, words)
            if path.startswith(files):
                return self._file(folders, *path.removeprefix(files).split("/", 1), body=body)
        return self._send(404, b"", {"X-Error-Code": "RepoNotFound"})

    def _listing(self, folders: dict[str, Path], repository: str, words: list[str]) -> None:
        revision = _revision(words[1] if len(words) > 1 else "main")
        if revision is None or revision not in folders:
            return self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
        folder = folders[revision]
        names = sorted(str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file())
        if words[0] == "tree":
            entries = [_entry(folder / name, name) for name in names]
            return self._json(entries)
        siblings = [{"rfilename": name} for name in names]
        return self._json({"id": repository, "sha": COMMITS[revision], "siblings": siblings, "tags": []})

    def _file(self, folders: dict[str, Path], revision: str, name: str, *, body: bool) -> None:
        known = _revision(revision)
        if known is None or known not in folders:
            return self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
        file = folders[known] / name
        if not file.is_file():
            return self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
        data = file.read_bytes()
        headers = {"X-Repo-Commit": COMMITS[known], "ETag": f'"{hashlib.sha256(data).hexdigest()}"'}
        headers |= {"Accept-Ranges": "bytes", "X-Linked-Size": str(len(data))}
        span = self.headers.get("Range", "")
        if body and span.startswith("bytes=") and self.hub.ranges:
            first, _, last = span.removeprefix("bytes=").partition("-")
            stop = min(int(last) + 1 if last else len(data), len(data))
            headers["Content-Range"] = f"bytes {first}-{stop - 1}/{len(data)}"
            return self._send(206, data[int(first) : stop], headers)
        return self._send(200, data, headers, body=body)

    def _json(self, document: Any, code: int = 200) -> None:
        self._send(code, json.dumps(document).encode(), {"Content-Type": "application/json"})

    def _send(
        self, code: int, data: bytes, headers: dict[str, str] | None = None, *, body: bool = True
    ) -> None:
        self.send_response(code)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if body and self.command != "HEAD":
            self.wfile.write(data[: self._cut(len(data))])

    def _cut(self, size: int) -> int | None:
        """Return the size at which a download ends early; only once."""
        cut = self.hub.cut_at
        if cut is None or size <= cut or "/resolve/" not in self.path:
            return None
        self.hub.cut_at, self.close_connection = None, True
        return cut


def _revision(word: str) -> str | None:
    return next((name for name, commit in COMMITS.items() if word in (name, commit)), None)


def _mode(path: str) -> str:
    return "lfs" if path.endswith(".safetensors") else "regular"


def _action(hub: Hub, wanted: dict[str, Any]) -> dict[str, Any]:
    upload = {"href": f"{hub.address}/lfs/{wanted['oid']}"}
    return {
        "oid": wanted["oid"],
        "size": wanted["size"],
        "authenticated": True,
        "actions": {"upload": upload},
    }


def _entry(file: Path, name: str) -> dict[str, Any]:
    data = file.read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    found: dict[str, Any] = {"type": "file", "path": name, "size": len(data), "oid": digest[:40]}
    return found | (
        {"lfs": {"oid": digest, "size": len(data), "pointerSize": 134}} if _mode(name) == "lfs" else {}
    )
