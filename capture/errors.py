"""What goes wrong for a reason the user can remedy; command lines print it as one sentence."""


class CaptureError(Exception):
    """A recording that cannot start or holds nothing; the message names the remedy."""


class DatasetError(Exception):
    """A dataset, or one file of it, that cannot be read; the message names the file."""
