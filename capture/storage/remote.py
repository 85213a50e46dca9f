"""Reads datasets at addresses that fsspec supports: `hf://`, `s3://`, `https://` and others.

The extra `remote` installs the libraries.
"""

from __future__ import annotations

import contextlib
import errno
import re
import secrets
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit, urlunsplit

from capture.errors import DatasetError
from capture.storage import cache
from capture.storage.cached_copy import ProgressReport, Unreachable
from capture.storage.names import MANIFEST

_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(://|::)")
_PACKAGES = {
    "hf": "huggingface_hub",
    "s3": "s3fs",
    "http": "'fsspec[http]'",
    "https": "'fsspec[http]'",
    "gs": "gcsfs",
}
"""Package to install for each scheme."""
LOG_IN = {
    "s3": "set AWS_PROFILE or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; for a public bucket, "
    "FSSPEC_S3_ANON=true",
    "gs": "log in with gcloud auth application-default login; for a public bucket, "
    "FSSPEC_GS_TOKEN=anon",
    "hf": "log in with `hf auth login`, or set HF_TOKEN",
}
_VERSIONS = {
    *("etag", "blob_id", "last-modified", "lastmodified", "last_modified", "mtime", "created"),
    "updated",
}
"""Names, in lower case, of file properties that change with a file's version."""


def is_address(where: str) -> bool:
    """Return whether a string is a remote address rather than a local path."""
    return _ADDRESS.match(where) is not None


def without_secrets(address: str) -> str:
    """Return an address for printing, without a password or a link's signature."""
    address = re.sub(r"//[^/@]*@", "//", address)
    return address.partition("?")[0] if _is_http(address) else address


def path_of(address: str) -> str:
    """Return the path in an address; its extension shows whether the address is an archive.

    For an address of several parts (`zip://FOLDER::s3://BUCKET/FILE`), the result is the first
    path that is not empty.
    """
    paths = (each.partition("://")[2] for each in without_secrets(address).split("::"))
    return next(filter(None, paths), "")


class RemoteDirectory:
    """Files of a directory at an address, as `DatasetFiles`."""

    def __init__(self, address: str) -> None:
        """Connect to the address's file system."""
        self.address = without_secrets(address)
        self.cache = cache.directory_of(address, cache.user_cache())
        self._lists_files = not _is_http(address)
        self._system, self._path = file_system(address)

    def sizes(self) -> dict[str, int] | None:
        if not self._lists_files:
            return None
        with _as_dataset_error(self.address):
            self._system.invalidate_cache()
            found = self._system.ls(self._path, detail=True)
        files = {each["name"].rstrip("/").rpartition("/")[2]: each for each in found}
        return {name: int(each["size"]) for name, each in files.items() if each["type"] == "file"}

    def copy(self, name: str, to: Path, limit: int, arrived: Callable[[int], None]) -> None:
        if self._lists_files:
            path = f"{self._path.rstrip('/')}/{name}"
        else:
            parts = urlsplit(self._path)
            path = urlunsplit(parts._replace(path=f"{parts.path.rstrip('/')}/{quote(name)}"))
        _download(self._system, path, to, limit, arrived, f"{self.address.rstrip('/')}/{name}")


def archive(address: str, report: ProgressReport) -> tuple[Path, Path]:
    """Download an archive if the cache lacks it; return its path and its cache directory."""
    shown, copies = without_secrets(address), cache.directory_of(address, cache.user_cache())
    system, path = file_system(address)
    with _as_dataset_error(shown):
        system.invalidate_cache()
        info = system.info(path)
    has_version = any(name.lower() in _VERSIONS and value for name, value in info.items())
    # If no property shows changes, the archive is copied again.
    state = repr(sorted((name, str(info[name])) for name in info)).encode()
    file = cache.version(copies, state if has_version else secrets.token_bytes()) / "archive"
    if not file.exists():
        size = int(info.get("size") or 0)
        with cache.placed(file) as temporary:
            limit = size or sys.maxsize
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
    # Read a file of the Hub with one request instead of one request for every 5 MiB.
    options = {"block_size": 0} if scheme_of(shown) == "hf" else {}
    # Copy in a thread, because fsspec would print pending tasks if Ctrl-C interrupted it.
    with _as_dataset_error(shown), ThreadPoolExecutor(1) as thread:
        copying = thread.submit(system.get_file, path, str(to), callback=counter, **options)
        try:
            copying.result()
        except BaseException:
            counter.left = -1
            raise
    if to.stat().st_size > limit:
        raise DatasetError(f"{shown}: has more than {limit} bytes")


def file_system(address: str) -> tuple[Any, str]:
    """Return fsspec's file system for an address, and the path in this file system."""
    shown, scheme, options = without_secrets(address), scheme_of(address), {}
    try:
        from fsspec.core import url_to_fs

        if _is_http(address):
            import aiohttp

            # By default, aiohttp limits a file to five minutes and ignores HTTPS_PROXY.
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=60)
            options = {"client_kwargs": {"timeout": timeout, "trust_env": True}}
        return url_to_fs(address, **options)
    except ImportError as error:
        package = _PACKAGES.get(scheme)
        remedy = f"pip install {package}" if package else first_line(error)
        raise DatasetError(
            f"{shown}: {scheme}:// requires a package that is not installed: {remedy}"
        ) from error
    except ValueError as error:
        raise DatasetError(
            f"{shown}: cannot be read ({first_line(error)}): give a directory, an archive, or an "
            "address such as hf://datasets/ORG/NAME, s3://BUCKET/PATH or https://"
        ) from error
    except Exception as error:
        raise _explained(shown, error) from error


@contextlib.contextmanager
def _as_dataset_error(shown: str) -> Iterator[None]:
    """Convert the errors of any file system to a `DatasetError`."""
    try:
        yield
    except DatasetError:
        raise
    except Exception as error:
        raise _explained(shown, error) from error


def _explained(shown: str, error: Exception) -> DatasetError:
    """Return an error that states what failed and what to do."""
    scheme, causes = scheme_of(shown), list(_causes(error))
    names = {each.__name__ for cause in causes for each in type(cause).__mro__}
    statuses = {_status(cause) for cause in causes}
    numbers = {getattr(cause, "errno", None) for cause in causes}
    reason = first_line(causes[-1]).replace(shown, "").strip(" :,") or type(error).__name__
    if numbers & {errno.ENOSPC, errno.EDQUOT, errno.EROFS}:
        return Unreachable(f"{shown}: cannot be copied here ({reason}): make room for it")
    # The Hub gives the same error for a missing repository and for a hidden one.
    hidden = "RepositoryNotFoundError" in names and "GatedRepoError" not in names
    denied = {"PermissionError", "NoCredentialsError", "PartialCredentialsError", "GatedRepoError"}
    if not hidden and (statuses & {401, 403} or names & denied):
        remedy = LOG_IN.get(scheme, "log in, or check the address")
        return Unreachable(f"{shown}: access is denied ({reason}): {remedy}")
    silent = {"ConnectionError", "ClientConnectionError", "ConnectError", "TimeoutError"}
    if hidden or 404 in statuses or ("FileNotFoundError" in names and not names & silent):
        hint = f"; over HTTP, a directory is read by its {MANIFEST}" if _is_http(shown) else ""
        hint = f"; {LOG_IN['hf']} if it is private" if scheme == "hf" else hint
        return DatasetError(f"{shown}: not found; check the address{hint}")
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


def scheme_of(address: str) -> str:
    return re.split("://|::", address, maxsplit=1)[0].lower()


def _is_http(address: str) -> bool:
    return scheme_of(address) in ("http", "https")


def first_line(error: BaseException) -> str:
    line = (str(error).strip().splitlines() or [""])[0]
    line = re.sub(r",? (for )?url[=: ].*", "", line)  # a URL may contain a password
    return line.rstrip(".: ")[:200] or type(error).__name__
