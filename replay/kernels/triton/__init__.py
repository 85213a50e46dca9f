"""Our own attention kernels, written in Triton.

Every file holds plain functions on BHSD tensors with SDPA-like arguments and needs torch and Triton
only; `replay/kernels/triton_*.py` register them. Importing a file imports Triton, so adapters
import them when a kernel is first run. With TRITON_INTERPRET=1 set before that, they run on the CPU
in Triton's interpreter, which shows whether they are right and nothing about their speed.

Suffixes: B batch, Hq query heads, Hkv key/value heads, H any heads, S sequence, D head dimension,
T tokens of all batch elements in a row.
"""
