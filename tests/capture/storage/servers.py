"""Local servers that implement the parts of HTTP, S3 and the Hub that datasets need."""

import base64
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
    """State of a server, which tests can read and change while the server runs."""

    root: Path
    url: str = ""
    asked: list[str] = field(default_factory=list)
    """Method and path of each received request, in order."""
    status: int = 0
    """HTTP status of every response, or 0 for normal responses."""
    dated: bool = True
    """True if responses include the version of a file."""

    def got(self) -> list[str]:
        """Return the names of the call files that were sent."""
        paths = [each.partition(" ")[2] for each in self.asked if each.startswith("GET ")]
        return [path.rpartition("/")[2] for path in paths if path.endswith(".safetensors")]


class _Plain(BaseHTTPRequestHandler):
    """Web server that cannot list directories."""

    state: Server

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self.state.asked.append(f"{self.command} {self.path}")
        if self.state.status:
            self.send(status=self.state.status)
        else:
            self.route(unquote(urlsplit(self.path).path).strip("/"))

    do_HEAD = do_GET

    def route(self, path: str) -> None:
        self.send_file(self.state.root / path)

    def send_file(self, path: Path) -> None:
        if not path.is_file():
            return self.send(status=404)
        headers = {"ETag": f'"{digest_of(path)}"'} if self.state.dated else {}
        return self.send(path.read_bytes(), headers)

    def send(
        self, content: bytes = b"", headers: dict[str, str] | None = None, status: int = 200
    ) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            with contextlib.suppress(ConnectionError):  # the reader may stop early
                self.wfile.write(content)


class _S3(_Plain):
    """S3 server that lists and reads; its buckets are the directories in the root."""

    def route(self, path: str) -> None:
        query = parse_qs(urlsplit(self.path).query)
        if "list-type" not in query:
            return super().route(path)
        bucket, prefix = self.state.root / path, query.get("prefix", [""])[0]
        files = [path for path in sorted(bucket.rglob("*")) if path.is_file()]
        keys = {str(path.relative_to(bucket)): path.stat().st_size for path in files}
        below = {key: key[len(prefix) :] for key in keys if key.startswith(prefix)}
        contents = "".join(
            f"<Contents><Key>{escape(key)}</Key><Size>{keys[key]}</Size>"
            "<LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>x</ETag></Contents>"
            for key, name in below.items()
            if "/" not in name
        )
        folders = {name.partition("/")[0] for name in below.values() if "/" in name}
        common = "".join(
            f"<CommonPrefixes><Prefix>{escape(prefix + each)}/</Prefix></CommonPrefixes>"
            for each in sorted(folders)
        )
        text = (
            '<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
            f"<IsTruncated>false</IsTruncated>{contents}{common}</ListBucketResult>"
        )
        return self.send(text.encode(), {"Content-Type": "application/xml"})


class _Hub(_Plain):
    """Hub server whose repositories are the directories `org/name` in the root."""

    def route(self, path: str) -> None:
        parts = path.split("/")
        is_api = parts[0] == "api"
        repository, rest = (parts[2:4], parts[4:]) if is_api else (parts[1:3], parts[3:])
        folder = self.state.root.joinpath(*repository)
        if not folder.is_dir():
            return self.send(b"", {"X-Error-Code": "RepoNotFound"}, 401)
        if rest[1:] and rest[1] not in ("main", "v1"):
            return self.send(b"", {"X-Error-Code": "RevisionNotFound"}, 404)
        if not is_api:
            return self.send_file(folder.joinpath(*rest[2:]))
        if not rest or rest[0] == "revision":
            return self.send_json({"id": "/".join(repository), "sha": "0" * 40, "siblings": []})
        below = folder.joinpath(*rest[2:])
        if not below.is_dir():
            return self.send(b"", {"X-Error-Code": "EntryNotFound"}, 404)
        entries = [
            {
                "type": "directory" if each.is_dir() else "file",
                "oid": "0" * 40 if each.is_dir() else digest_of(each),
                "size": 0 if each.is_dir() else each.stat().st_size,
                "path": str(each.relative_to(folder)),
            }
            for each in sorted(below.iterdir())
        ]
        return self.send_json(entries)

    def do_POST(self) -> None:
        """Create a repository, or commit files to one."""
        self.state.asked.append(f"POST {self.path}")
        content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        _api, _kind, *parts = urlsplit(self.path).path.strip("/").split("/")
        if self.state.status:
            return self.send(status=self.state.status)
        if self.path == "/api/repos/create":
            made = json.loads(content)
            name = f"{made['organization']}/{made['name']}"
            (self.state.root / name).mkdir(parents=True, exist_ok=True)
            return self.send_json({"url": f"{self.state.url}/datasets/{name}"})
        if parts[2:3] == ["preupload"]:
            files = [each["path"] for each in json.loads(content)["files"]]
            modes = {"uploadMode": "regular", "shouldIgnore": False}
            return self.send_json({"files": [{"path": path, **modes} for path in files]})
        if parts[2:3] == ["commit"]:
            folder = self.state.root.joinpath(*parts[:2])
            for line in map(json.loads, content.splitlines()):
                path = folder / line["value"].get("path", "")
                if line["key"] == "deletedFile":
                    path.unlink()
                elif line["key"] == "file":
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(base64.b64decode(line["value"]["content"]))
            url = f"{self.state.url}/datasets/{'/'.join(parts[:2])}/commit/1"
            return self.send_json({"commitOid": "1" * 40, "commitUrl": url})
        return self.send_json({"errors": [], "warnings": []})  # of the card's front matter

    def send_json(self, data: object) -> None:
        self.send(json.dumps(data).encode(), {"Content-Type": "application/json"})


def digest_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


KINDS: dict[str, type[_Plain]] = {"http": _Plain, "s3": _S3, "hub": _Hub}


@contextlib.contextmanager
def serving(kind: str, root: Path) -> Iterator[Server]:
    """Serve a directory until the end of the block."""
    state = Server(root)
    handler = type("Handler", (KINDS[kind],), {"state": state})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        state.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield state
        finally:
            server.shutdown()
            thread.join()
