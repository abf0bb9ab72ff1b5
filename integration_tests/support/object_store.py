"""A small server on loopback of those endpoints of S3 and of Google Cloud Storage that read objects and list them."""

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from loopback import served

os.environ["NO_GCE_CHECK"] = "true"  # google.auth reads it once, when it is imported
_WHEN = "2026-01-01T00:00:00.000Z"
_CODES = {
    "NoSuchKey": 404,
    "NoSuchBucket": 404,
    "AccessDenied": 403,
}

OF_THE_USER = (
    "AWS_PROFILE",
    "AWS_SESSION_TOKEN",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_ENDPOINT_URL_S3",
    "GOOGLE_APPLICATION_CREDENTIALS",
    "GOOGLE_CLOUD_PROJECT",
    "GOOGLE_CLOUD_QUOTA_PROJECT",
)
"""Variables that say who the user is; the clients may not see them, or they would tell this server."""


@dataclass
class Store:
    """Served objects, and the requests for them.

    Args:
        objects: Contents by ``bucket/key``.
        refuses: Whether nobody may read.
        cut_at: Bytes of a body after which the connection ends; None: it does not.
    """

    objects: dict[str, bytes]
    refuses: bool = False
    cut_at: int | None = None
    address: str = ""
    asked: list[tuple[str, str, str]] = field(default_factory=list)
    """Method, path and range of each request."""

    def environment(self) -> dict[str, str]:
        """Return the environment that leads both clients to this server."""
        return {
            "AWS_ENDPOINT_URL": self.address,
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "STORAGE_EMULATOR_HOST": self.address,
            "CLOUDSDK_CONFIG": os.devnull,
            "no_proxy": "127.0.0.1",
        }

    def bodies(self, name: str) -> int:
        """Return the number of requests for the contents of an object with this ending."""
        of_files = [
            path for method, path, _ in self.asked if method == "GET" and not path.startswith("/storage/")
        ]
        return sum(path.endswith(name) for path in of_files)

    def problem(self, name: str) -> str | None:
        """Return S3's error about the object ``bucket/key``."""
        if self.refuses:
            return "AccessDenied"
        if name in self.objects:
            return None
        bucket = name.partition("/")[0] + "/"
        return "NoSuchKey" if any(each.startswith(bucket) for each in self.objects) else "NoSuchBucket"

    def below(self, bucket: str, prefix: str) -> dict[str, bytes]:
        """The objects of ``bucket`` whose keys begin so, by key."""
        found = {name.partition("/")[::2]: data for name, data in self.objects.items()}
        return {key: data for (own, key), data in found.items() if own == bucket and key.startswith(prefix)}


@contextmanager
def serving(store: Store) -> Iterator[Store]:
    """A block in which ``store`` is served."""
    with served(Handler, store=store) as store.address:
        yield store


class Handler(BaseHTTPRequestHandler):
    store: Store

    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        path, query = unquote(parts.path), parse_qs(parts.query, keep_blank_values=True)
        self.store.asked.append((self.command, path, self.headers.get("Range", "")))
        if path.startswith("/download/storage/v1/b/"):
            self._object(_name(path.removeprefix("/download/storage/v1/b/")), self._refuse_json)
        elif path.startswith("/storage/v1/b/"):
            self._metadata(path.removeprefix("/storage/v1/b/"), query.get("prefix", [""])[0])
        elif "list-type" in query:
            self._listing(path.strip("/"), query.get("prefix", [""])[0])
        else:
            self._object(path.strip("/"), self._refuse_xml)

    def _object(self, name: str, refuse: Any) -> None:
        if (problem := self.store.problem(name)) is not None:
            return refuse(problem)
        data = self.store.objects[name]
        headers = {"ETag": f'"{_digest(data)}"', "Accept-Ranges": "bytes", "Content-Type": "text/plain"}
        headers["Last-Modified"] = "Thu, 01 Jan 2026 00:00:00 GMT"
        span = self.headers.get("Range", "")
        if not span.startswith("bytes="):
            return self._send(200, data, headers)
        first, _, last = span.removeprefix("bytes=").partition("-")
        stop = min(int(last) + 1 if last else len(data), len(data))
        headers["Content-Range"] = f"bytes {first}-{stop - 1}/{len(data)}"
        return self._send(206, data[int(first) : stop], headers)

    def _metadata(self, path: str, prefix: str) -> None:
        """Google's description of an object, or of the objects of a bucket."""
        bucket, _, key = path.partition("/o")
        if key:
            name = f"{bucket}{key}"
            if (problem := self.store.problem(name)) is not None:
                return self._refuse_json(problem)
            return self._json(_item(name, self.store.objects[name]))
        problem = self.store.problem(f"{bucket}/")
        if problem in ("AccessDenied", "NoSuchBucket"):
            return self._refuse_json(problem)
        items = [_item(f"{bucket}/{key}", data) for key, data in self.store.below(bucket, prefix).items()]
        return self._json({"kind": "storage#objects", "items": items})

    def _listing(self, bucket: str, prefix: str) -> None:
        """S3's list of objects."""
        problem = self.store.problem(f"{bucket}/")
        if problem in ("AccessDenied", "NoSuchBucket"):
            return self._refuse_xml(problem)
        entries = "".join(
            f"<Contents><Key>{escape(key)}</Key><LastModified>{_WHEN}</LastModified>"
            f"<ETag>&quot;{_digest(data)}&quot;</ETag><Size>{len(data)}</Size></Contents>"
            for key, data in self.store.below(bucket, prefix).items()
        )
        count = entries.count("<Key>")
        body = f"<Name>{bucket}</Name><KeyCount>{count}</KeyCount><IsTruncated>false</IsTruncated>{entries}"
        return self._send(200, f"<ListBucketResult>{body}</ListBucketResult>".encode(), _XML)

    def _refuse_xml(self, code: str) -> None:
        body = f"<Error><Code>{code}</Code><Message>{code} it is</Message></Error>"
        self._send(_CODES[code], body.encode(), _XML)

    def _refuse_json(self, code: str) -> None:
        error = {"code": _CODES[code], "message": f"{code} it is", "errors": [{"reason": code}]}
        self._json({"error": error}, _CODES[code])

    def _json(self, document: Any, code: int = 200) -> None:
        self._send(code, json.dumps(document).encode(), {"Content-Type": "application/json"})

    def _send(self, code: int, data: bytes, headers: dict[str, str]) -> None:
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "HEAD":
            return
        cut = self.store.cut_at if code in (200, 206) and headers.get("Accept-Ranges") else None
        self.wfile.write(data[:cut])
        if cut is not None and cut < len(data):
            self.close_connection = True


_XML = {"Content-Type": "application/xml"}


def _digest(data: bytes) -> str:
    return hashlib.md5(data).hexdigest()


def _name(path: str) -> str:
    bucket, _, key = path.partition("/o/")
    return f"{bucket}/{key}"


def _item(name: str, data: bytes) -> dict[str, str]:
    bucket, _, key = name.partition("/")
    found = {"kind": "storage#object", "bucket": bucket, "name": key, "size": str(len(data))}
    return found | {"etag": _digest(data), "generation": "1", "updated": _WHEN, "timeCreated": _WHEN}
