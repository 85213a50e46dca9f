"""How every file in this package refuses."""

from attention_replay import Error


class ModelError(Error):
    """A model cannot be built as asked: one sentence that names the remedy."""
