"""What goes wrong for a reason the user can remedy; command lines print it as one sentence."""


class MissingPackage(Exception):
    """A package that a command needs and this environment lacks."""

    def __init__(self, error: ModuleNotFoundError) -> None:
        name = (error.name or str(error)).partition(".")[0]
        super().__init__(f"{name} is not installed, and this needs it: pip install {name}")


class CaptureError(Exception):
    """A recording that cannot start or holds nothing; the message names the remedy.

    `record`'s arguments stand in it as `out=` or `overwrite=True`, in backquotes, so that the
    command line can name its flags instead.
    """


class DatasetError(Exception):
    """A dataset, or one file of it, that cannot be read; the message names the file."""
