"""The format on disk: written, read and checked."""
