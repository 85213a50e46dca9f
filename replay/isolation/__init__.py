"""The protection of measurements (`docs/isolation.md`): only what another process observed counts.

The parent draws the inputs of blocks of calls and clocks them, a judge in another process examines
their outputs, and the processes of a kernel are stopped while others are timed.
"""
