"""Times and energy of kernels, and the machine that they ran on."""
