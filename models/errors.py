"""Error that every file in this package raises."""

from attention_replay.errors import Error


class ModelError(Error):
    """A model cannot be built as requested; the message names the remedy."""
