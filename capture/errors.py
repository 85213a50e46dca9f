"""What goes wrong for a reason the user can remedy; command lines print it as one sentence."""

from __future__ import annotations

from attention_replay import Error


class MissingPackage(Error):
    """A package that a command needs and this environment lacks."""

    @classmethod
    def behind(cls, error: Exception) -> Exception:
        """What to tell for an error: this one for a missing package, itself for any other.

        A part of an installed package that is missing, ours too, is a defect and not for pip.
        """
        if not isinstance(error, ModuleNotFoundError) or error.name is None or "." in error.name:
            return error
        return cls(f"{error.name} is not installed, and this needs it: pip install {error.name}")


class CaptureError(Error):
    """A recording that cannot start or holds nothing; the message names the remedy.

    `record`'s arguments stand in it as `out=` or `overwrite=True`, in backquotes, so that the
    command line can name its flags instead.
    """


class DatasetError(Error):
    """A dataset, or one file of it, that cannot be read; the message names the file."""
