"""Uploads the directory of a dataset to an address that fsspec can write to.

A dataset of the Hub is uploaded in one commit, so that readers never see half of it.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from capture.errors import DatasetError
from capture.storage import remote
from capture.storage.names import CALL, MANIFEST


class HubDataset(NamedTuple):
    """Place in a dataset repository of the Hub."""

    repository: str
    revision: str | None
    folder: str

    @classmethod
    def parse(cls, address: str) -> HubDataset | None:
        """Read `hf://datasets/ORG/NAME[@REVISION][/FOLDER]`; return None for other schemes.

        Raises:
            DatasetError: the address has another form.
        """
        if remote.scheme_of(address) != "hf":
            return None
        found = re.fullmatch(r"hf://datasets/([^/@]+/[^/@]+)(?:@([^/]+))?(?:/(.*?))?/?", address)
        if found is None:
            raise DatasetError(f"{address}: expected hf://datasets/USER/NAME")
        return cls(found[1], found[2], found[3] or "")


def refuse_existing(address: str) -> None:
    """Raise DatasetError if a dataset exists at an address, or the address cannot be written."""
    shown = remote.without_secrets(address)
    if remote.scheme_of(address) in ("http", "https"):
        raise DatasetError(f"{shown}: cannot be written over HTTP: give hf://datasets/USER/NAME")
    with _writing(address):
        system, path = remote.file_system(address)
        try:
            system.info(f"{path.rstrip('/')}/{MANIFEST}")
        except FileNotFoundError:
            return
    remedy = "replace it with `overwrite=True`, or " if HubDataset.parse(address) else ""
    raise DatasetError(f"{shown}: already holds a recording: {remedy}name another place")


def upload(directory: Path, address: str) -> None:
    """Upload the files of a directory, and replace those of an earlier dataset of the Hub.

    A new repository of the Hub is private.
    """
    hub = HubDataset.parse(address)
    with _writing(address):
        if hub is None:
            system, path = remote.file_system(address)
            system.makedirs(path, exist_ok=True)
            # The manifest is last, so that an interrupted upload is not taken for a dataset.
            names = sorted(
                (each.name for each in directory.iterdir()), key=lambda name: name == MANIFEST
            )
            for name in names:
                system.put_file(str(directory / name), f"{path.rstrip('/')}/{name}")
            return
        from huggingface_hub import HfApi

        api = HfApi()
        api.create_repo(hub.repository, repo_type="dataset", private=True, exist_ok=True)
        api.upload_folder(
            repo_id=hub.repository,
            repo_type="dataset",
            folder_path=directory,
            path_in_repo=hub.folder or None,
            revision=hub.revision,
            commit_message="Share recorded attention calls",
            delete_patterns=[f"*{CALL}"],
        )


@contextlib.contextmanager
def _writing(address: str) -> Iterator[None]:
    """Convert the errors of any file system to a `DatasetError`."""
    try:
        yield
    except DatasetError:
        raise
    except Exception as error:
        shown, reason = remote.without_secrets(address), remote.first_line(error)
        log_in = remote.LOG_IN.get(remote.scheme_of(address), "log in, or check the address")
        raise DatasetError(
            f"{shown}: cannot be written ({reason}): check the network, and {log_in}"
        ) from error
