"""Local servers for the parts of HTTP, S3 and the Hub that datasets need."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape


@dataclass
class Server:
    """State of a server, which a test can read and change while the server runs."""

    root: Path
    url: str = ""
    asked: list[str] = field(default_factory=list)
    """Method and path of each request, in order."""
    status: int = 0
    """HTTP status of every response; 0 for normal responses."""
    headers: dict[str, str] = field(default_factory=dict)
    dated: bool = True
    """True if the server sends the version of a file."""

    def got(self) -> list[str]:
        """Return the names of the call files that were sent."""
        paths = [each.partition(" ")[2] for each in self.asked if each.startswith("GET ")]
        return [path.rpartition("/")[2] for path in paths if path.endswith(".safetensors")]


class _Plain(BaseHTTPRequestHandler):
    """A web server that lists no directories."""

    server_state: Server

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer(sends=False)

    def do_GET(self) -> None:
        self.answer(sends=True)

    def answer(self, *, sends: bool) -> None:
        self.server_state.asked.append(f"{self.command} {self.path}")
        if self.server_state.status:
            return self.send(b"", {}, self.server_state.status, sends=sends)
        return self.route(unquote(urlsplit(self.path).path), sends=sends)

    def route(self, path: str, *, sends: bool) -> None:
        self.send_file(self.server_state.root / path.lstrip("/"), {}, sends=sends)

    def send_file(self, path: Path, headers: dict[str, str], *, sends: bool) -> None:
        if not path.is_file():
            return self.send(b"", {"X-Error-Code": "EntryNotFound"}, 404, sends=sends)
        content = path.read_bytes()
        if self.server_state.dated:
            headers = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', **headers}
        return self.send(content, headers, sends=sends)

    def send(
        self, content: bytes, headers: dict[str, str], status: int = 200, *, sends: bool
    ) -> None:
        self.send_response(status)
        for name, value in {**headers, **self.server_state.headers}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if sends:
            self.wfile.write(content)


class _S3(_Plain):
    """S3 server that lists and reads; buckets are the directories of the root."""

    def route(self, path: str, *, sends: bool) -> None:
        query = parse_qs(urlsplit(self.path).query)
        if "list-type" not in query:
            return super().route(path, sends=sends)
        bucket, prefix = path.strip("/"), query.get("prefix", [""])[0]
        keys = {
            str(file.relative_to(self.server_state.root / bucket)): file
            for file in sorted((self.server_state.root / bucket).rglob("*"))
            if file.is_file()
        }
        contents = "".join(
            f"<Contents><Key>{escape(key)}</Key><Size>{file.stat().st_size}</Size>"
            "<LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>x</ETag></Contents>"
            for key, file in keys.items()
            if key.startswith(prefix) and "/" not in key[len(prefix) :]
        )
        folders = {
            prefix + key[len(prefix) :].partition("/")[0] + "/"
            for key in keys
            if key.startswith(prefix) and "/" in key[len(prefix) :]
        }
        common = "".join(
            f"<CommonPrefixes><Prefix>{escape(each)}</Prefix></CommonPrefixes>"
            for each in sorted(folders)
        )
        text = (
            '<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
            f"<IsTruncated>false</IsTruncated>{contents}{common}</ListBucketResult>"
        )
        return self.send(text.encode(), {"Content-Type": "application/xml"}, sends=sends)


class _Hub(_Plain):
    """Hub server with repositories `org/name` in the root; a commit is a digest of the content."""

    def route(self, path: str, *, sends: bool) -> None:
        parts = path.strip("/").split("/")
        api = parts[0] == "api"
        repository = "/".join(parts[2:4] if api else parts[1:3])
        folder = self.server_state.root / repository
        if not folder.is_dir():
            return self.send(b"", {"X-Error-Code": "RepoNotFound"}, 401, sends=sends)
        commit = self.commit(folder)
        rest = parts[4:] if api else parts[3:]
        if rest and len(rest) > 1 and rest[1] not in ("main", "v1", commit):
            return self.send(b"", {"X-Error-Code": "RevisionNotFound"}, 404, sends=sends)
        if api and (not rest or rest[0] == "revision"):
            return self.send_json({"id": repository, "sha": commit, "siblings": []}, sends=sends)
        if api:
            below = folder.joinpath(*rest[2:])
            if not below.is_dir():
                return self.send(b"", {"X-Error-Code": "EntryNotFound"}, 404, sends=sends)
            entries = [
                {
                    "type": "directory" if each.is_dir() else "file",
                    "oid": "0" * 40,
                    "size": 0 if each.is_dir() else each.stat().st_size,
                    "path": str(each.relative_to(folder)),
                }
                for each in sorted(below.iterdir())
            ]
            return self.send_json(entries, sends=sends)
        return self.send_file(folder.joinpath(*rest[2:]), {"X-Repo-Commit": commit}, sends=sends)

    def send_json(self, data: object, *, sends: bool) -> None:
        self.send(json.dumps(data).encode(), {"Content-Type": "application/json"}, sends=sends)

    def commit(self, folder: Path) -> str:
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        digests = [f"{path} {hashlib.sha256(path.read_bytes()).hexdigest()}" for path in files]
        return hashlib.sha1("\n".join(digests).encode()).hexdigest()


KINDS: dict[str, type[_Plain]] = {"http": _Plain, "s3": _S3, "hub": _Hub}


@contextlib.contextmanager
def serving(kind: str, root: Path) -> Iterator[Server]:
    """Serve a directory until the end of the block."""
    state = Server(root)
    handler = type("Handler", (KINDS[kind],), {"server_state": state})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        state.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield state
        finally:
            server.shutdown()
            thread.join()
