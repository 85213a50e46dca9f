"""Reads datasets at addresses: `hf://`, `s3://`, `https://` and others that fsspec supports.

The extra `remote` installs the libraries. Datasets of the Hugging Face Hub are read through
`huggingface_hub` and its cache, which other programs share.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import inspect
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from capture.errors import DatasetError
from capture.storage import cache
from capture.storage.cached_copy import ProgressReport, Unreachable
from capture.storage.names import MANIFEST

_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(://|::)")
_HUB = re.compile(
    r"hf://datasets/(?P<repository>[^/@]+/[^/@]+)"
    r"(@(?P<revision>refs/(pr|convert)/[^/]+|[^/]+))?(/(?P<path>.*))?"
)
_SECONDS = 10.0
"""Time limit for a response of the Hub."""
_PACKAGES = {"s3": "s3fs", "http": "'fsspec[http]'", "https": "'fsspec[http]'", "gs": "gcsfs"}
"""Package to install for each scheme."""
_LOG_IN = {
    "s3": "set AWS_PROFILE or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; for a public bucket, "
    "FSSPEC_S3_ANON=true",
    "gs": "log in with gcloud auth application-default login; for a public bucket, "
    "FSSPEC_GS_TOKEN=anon",
    "hf": "log in with `hf auth login`, or set HF_TOKEN",
}
_CHANGES = {"etag", "last-modified", "lastmodified", "last_modified", "mtime", "created", "updated"}
"""Names, in lower case, of file properties that change with a file's version."""


def is_address(where: str) -> bool:
    """Return whether a text is an address rather than the path of a local file."""
    return _ADDRESS.match(where) is not None


def without_secrets(address: str) -> str:
    """Return an address for printing, without a password or a link's signature."""
    address = re.sub(r"//[^/@]*@", "//", address)
    return address.partition("?")[0] if _scheme(address) in ("http", "https") else address


def path_of(address: str) -> str:
    """Return the path in an address, which shows by its extension whether it is an archive.

    For an address of several parts (`zip://FOLDER::s3://BUCKET/FILE`), the result is the first
    path that is not empty.
    """
    paths = (each.partition("://")[2] for each in without_secrets(address).split("::"))
    return next(filter(None, paths), "")


class FsspecDirectory:
    """Files of a directory that fsspec reads, as `DatasetFiles`."""

    def __init__(self, address: str) -> None:
        """Connect to the address's file system."""
        self.address = without_secrets(address)
        self.cache = cache.directory_of(address, cache.user_cache())
        self._given = address
        self._system, self._path = _file_system(address)

    def sizes(self) -> dict[str, int] | None:
        if _scheme(self._given) in ("http", "https"):
            return None
        with _told(self.address):
            self._system.invalidate_cache()
            found = self._system.ls(self._path, detail=True)
        files = {each["name"].rstrip("/").rpartition("/")[2]: each for each in found}
        return {name: int(each["size"]) for name, each in files.items() if each["type"] == "file"}

    def copy(self, name: str, to: Path, limit: int, arrived: Callable[[int], None]) -> None:
        if _scheme(self._given) in ("http", "https"):
            parts = urlsplit(self._path)
            path = f"{parts.path.rstrip('/')}/{quote(name)}"
            path = urlunsplit(parts._replace(path=path))
        else:
            path = f"{self._path.rstrip('/')}/{name}"
        _download(self._system, path, to, limit, arrived, f"{self.address.rstrip('/')}/{name}")


class HubDirectory:
    """Files of a folder in a dataset of the Hub, as `DatasetFiles`.

    If the Hub cannot be reached, files in the Hub's local cache are read.
    """

    def __init__(self, address: str) -> None:
        """List the folder's files on the Hub."""
        self.address = address
        self.cache = _hub_cache(address)
        self._repository, self._revision, self._path = _hub_parts(address)
        self._offline = False
        with _told(address):
            self._sizes = self._listed()

    def _listed(self) -> dict[str, int]:
        from huggingface_hub import HfApi
        from huggingface_hub.errors import (
            EntryNotFoundError,
            RepositoryNotFoundError,
            RevisionNotFoundError,
        )

        api = HfApi()
        try:
            revision = self._revision
            found = api.dataset_info(self._repository, revision=revision, timeout=_SECONDS)
            self._revision = found.sha
            listed = api.list_repo_tree(
                self._repository, self._path or None, revision=self._revision, repo_type="dataset"
            )
            sizes = {
                entry.path.rpartition("/")[2]: entry.size
                for entry in listed
                if hasattr(entry, "size")
            }
            if MANIFEST in sizes:  # so that the Hub's cache contains the name of the revision
                _from_hub(self._repository, revision, self._inside(MANIFEST), lambda count: None)
            return sizes
        except (RepositoryNotFoundError, RevisionNotFoundError, EntryNotFoundError):
            raise
        except Exception:  # the Hub's client may use any of several HTTP libraries
            if not (folder := self._cached()):
                raise
            self._offline, self._revision = True, folder.name
            files = (folder / self._path).iterdir()
            return {path.name: path.stat().st_size for path in files if path.is_file()}

    def _cached(self) -> Path | None:
        """Return the snapshot in the Hub's cache; None if it lacks this dataset's manifest."""
        from huggingface_hub import snapshot_download

        with contextlib.suppress(Exception):  # as in `_listed`
            manifest = self._inside(MANIFEST)
            folder = Path(
                snapshot_download(
                    self._repository,
                    repo_type="dataset",
                    revision=self._revision,
                    allow_patterns=[glob.escape(manifest)],
                    local_files_only=True,
                )
            )
            return folder if (folder / manifest).is_file() else None
        return None

    def _inside(self, name: str) -> str:
        """Return the path of a file in the repository."""
        return f"{self._path}/{name}".lstrip("/")

    def sizes(self) -> dict[str, int]:
        return self._sizes

    def copy(self, name: str, to: Path, limit: int, arrived: Callable[[int], None]) -> None:
        if name not in self._sizes:
            raise DatasetError(f"{self.address}: {name} is missing")
        if self._sizes[name] > limit:
            raise DatasetError(f"{self.address}: {name} has more than {limit} bytes")
        path = self._inside(name)
        with _told(f"{self.address.rstrip('/')}/{name}"):
            blob = _from_hub(self._repository, self._revision, path, arrived, offline=self._offline)
        with cache.writing(to.parent):
            try:
                os.link(blob, to)
            except OSError:  # another file system, or one without links
                shutil.copyfile(blob, to)


def directory(address: str) -> FsspecDirectory | HubDirectory:
    """Return the files of a directory at an address."""
    return HubDirectory(address) if _is_of_hub(address) else FsspecDirectory(address)


def archive(address: str, report: ProgressReport) -> tuple[Path, Path]:
    """Download an archive if the cache lacks it; return its path and its cache directory."""
    if _is_of_hub(address):
        copies = _hub_cache(address)
        with _told(address):
            return _from_hub(*_hub_parts(address), lambda count: report(count, 0)), copies
    shown, copies = without_secrets(address), cache.directory_of(address, cache.user_cache())
    system, path = _file_system(address)
    with _told(shown):
        system.invalidate_cache()
        info = system.info(path)
    has_version = any(name.lower() in _CHANGES and value for name, value in info.items())
    # If no property shows changes, the archive is copied again.
    state = repr(sorted((name, str(info[name])) for name in info)).encode()
    file = cache.version(copies, state if has_version else secrets.token_bytes()) / "archive"
    if not file.exists():
        size = int(info.get("size") or 0)
        cache.require_room(copies, size, shown)
        limit = size or shutil.disk_usage(file.parent).free
        with cache.placed(file) as temporary:
            _download(system, path, temporary, limit, lambda count: report(count, size), shown)
    return file, copies


def _download(
    system: Any, path: str, to: Path, limit: int, arrived: Callable[[int], None], shown: str
) -> None:
    from fsspec import Callback

    class Counter(Callback):  # type: ignore[misc]
        """Progress of a download; stops the download when it exceeds the limit."""

        left = limit

        def relative_update(self, inc: int = 1) -> None:
            self.left -= inc
            if self.left < 0:
                raise DatasetError(f"{shown}: has more than {limit} bytes")
            arrived(inc)

    counter = Counter()
    # In a thread, because fsspec would print pending tasks if Ctrl-C interrupted it.
    with _told(shown), ThreadPoolExecutor(1) as thread:
        copying = thread.submit(system.get_file, path, str(to), callback=counter)
        try:
            copying.result()
        except BaseException:
            counter.left = -1
            raise
    if to.stat().st_size > limit:
        raise DatasetError(f"{shown}: has more than {limit} bytes")


def _file_system(address: str) -> tuple[Any, str]:
    """Return fsspec's file system for an address, and the path in this file system."""
    scheme, options = _scheme(address), {}
    try:
        from fsspec.core import url_to_fs

        if scheme in ("http", "https"):
            import aiohttp

            # By default, aiohttp limits a file to five minutes and ignores HTTPS_PROXY.
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=60)
            options = {"client_kwargs": {"timeout": timeout, "trust_env": True}}
        return url_to_fs(address, **options)
    except ImportError as error:
        package = _PACKAGES.get(scheme)
        remedy = f"pip install {package}" if package else _first_line(error)
        raise DatasetError(
            f"{without_secrets(address)}: reading {scheme}:// requires a package that is not "
            f"installed: {remedy}"
        ) from error
    except ValueError as error:
        raise DatasetError(
            f"{without_secrets(address)}: cannot be read ({_first_line(error)}): give a directory, "
            "an archive, or an address such as hf://datasets/ORG/NAME, s3://BUCKET/PATH or https://"
        ) from error
    except Exception as error:
        raise _explained(without_secrets(address), error) from error


def _is_of_hub(address: str) -> bool:
    return address.startswith("hf://datasets/")


def _hub_parts(address: str) -> tuple[str, str | None, str]:
    """Return repository, revision and path of an address on the Hub."""
    match = _HUB.fullmatch(address)
    path = ((match and match["path"]) or "").strip("/")
    if match is None or ".." in path.split("/"):
        raise DatasetError(
            f"invalid address {address} (must be hf://datasets/ORG/NAME[@REVISION][/FOLDER])"
        )
    return match["repository"], match["revision"] and unquote(match["revision"]), path


def _hub_cache(address: str) -> Path:
    """Return the directory for copies, next to the Hub's cache so that hard links are possible."""
    try:
        from huggingface_hub.constants import HF_ASSETS_CACHE
    except ImportError as error:
        raise DatasetError(
            f"{address}: reading hf:// requires huggingface_hub, which is not installed: "
            "pip install huggingface_hub"
        ) from error
    return cache.directory_of(address, Path(HF_ASSETS_CACHE) / "attention-replay" / "datasets")


def _from_hub(
    repository: str,
    revision: str | None,
    path: str,
    arrived: Callable[[int], None],
    *,
    offline: bool = False,
) -> Path:
    """Download a file to the Hub's cache, and return its path with symbolic links resolved."""
    from huggingface_hub import hf_hub_download
    from tqdm import tqdm

    class Counter(tqdm):  # type: ignore[misc]
        """Progress of a download, in place of the library's own bar."""

        def __init__(self, *arguments: Any, **options: Any) -> None:
            options.pop("name", None)
            super().__init__(*arguments, **{**options, "disable": True})

        def update(self, n: float | None = 1) -> None:
            arrived(int(n or 0))

    supported = inspect.signature(hf_hub_download).parameters
    options: dict[str, Any] = {"tqdm_class": Counter} if "tqdm_class" in supported else {}
    found = hf_hub_download(
        repository,
        path,
        repo_type="dataset",
        revision=revision,
        local_files_only=offline,
        **options,
    )
    return Path(os.path.realpath(str(found)))


@contextlib.contextmanager
def _told(shown: str) -> Iterator[None]:
    """Convert the errors of any file system to a `DatasetError`."""
    try:
        yield
    except DatasetError:
        raise
    except Exception as error:
        raise _explained(shown, error) from error


def _explained(shown: str, error: Exception) -> DatasetError:
    scheme, causes = _scheme(shown), list(_causes(error))
    names = {each.__name__ for cause in causes for each in type(cause).__mro__}
    statuses = {_status(cause) for cause in causes}
    numbers = {getattr(cause, "errno", None) for cause in causes}
    reason = _first_line(causes[-1]).replace(shown, "").strip(" :,") or type(error).__name__
    if numbers & {errno.ENOSPC, errno.EDQUOT, errno.EROFS}:
        return Unreachable(f"{shown}: cannot be copied here ({reason}): make room for it")
    # The Hub gives the same error for a missing repository and for a hidden one.
    hidden = "RepositoryNotFoundError" in names and "GatedRepoError" not in names
    denied = {"PermissionError", "NoCredentialsError", "PartialCredentialsError", "GatedRepoError"}
    if not hidden and (statuses & {401, 403} or names & denied):
        remedy = _LOG_IN.get(scheme, "log in, or check the address")
        return Unreachable(f"{shown}: access is denied ({reason}): {remedy}")
    silent = {"ConnectionError", "ClientConnectionError", "ConnectError", "TimeoutError"}
    missing = {"FileNotFoundError", "EntryNotFoundError", "RevisionNotFoundError"}
    if hidden or 404 in statuses or (names & missing and not names & silent):
        return DatasetError(f"{shown}: not found; check the address{_hint(shown)}")
    return Unreachable(
        f"{shown}: cannot be reached ({reason}): check the network and the address, or copy the "
        "dataset here and give the directory"
    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _status(error: BaseException) -> int | None:
    """Return the status of an HTTP response; each library stores it in a different place."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):  # botocore
        return response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    return getattr(response, "status_code", None) or getattr(error, "status", None)


def _hint(shown: str) -> str:
    if re.match("https?://(www[.])?huggingface[.]co/datasets/", shown):
        return ", or give hf://datasets/ORG/NAME"
    if _scheme(shown) in ("http", "https"):
        return f"; over HTTP, a directory is read by its {MANIFEST}"
    return f"; {_LOG_IN['hf']} if it is private" if _scheme(shown) == "hf" else ""


def _scheme(address: str) -> str:
    return re.split("://|::", address, maxsplit=1)[0].lower()


def _first_line(error: BaseException) -> str:
    line = (str(error).strip().splitlines() or [""])[0]
    line = re.sub(r",? (for )?url[=: ].*", "", line)  # a URL may contain a password
    return line.rstrip(".: ")[:200] or type(error).__name__
