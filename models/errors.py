"""How every file in this package refuses."""


class ModelError(Exception):
    """A model cannot be built as asked: one sentence that names the remedy."""
