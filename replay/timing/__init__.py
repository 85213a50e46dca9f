"""The times and energy of kernels, and the machine that ran them."""
