"""The kernels, a library a file; each file registers its own (see `replay.kernels.registry`)."""
