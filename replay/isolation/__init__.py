"""The protection of measurements (`docs/isolation.md`): only what another process observed counts.

The parent draws the inputs of blocks of calls and clocks the blocks. A judge in another process
examines their outputs. A kernel's processes are stopped while other kernels are timed.
"""
