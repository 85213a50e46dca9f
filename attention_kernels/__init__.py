"""Our own attention kernels, written in Triton.

What others import are plain functions on BHSD tensors with SDPA-like arguments, which need torch
and Triton only; `replay/kernels/adapters/triton_*.py` register them. Importing a file imports
Triton, so adapters import them when a kernel is first run. With TRITON_INTERPRET=1 set before that,
they run on the CPU in Triton's interpreter, which shows whether they are right and nothing about
their speed.

A file is such a function (`prefill.py`, `decode.py`), a kernel as the GPU runs it, to be read from
the top (`…_kernel.py`), how that is planned and launched (the same name without `_kernel`), or a
building block:

- of kernels for any GPU, in Triton: `online_softmax.py`, `masking.py`, `matmul.py`, and for decode
  `kv_cache.py`;
- of kernels for Hopper, in Gluon: `hopper_pipeline.py` (loads, barriers, turns), `hopper_scores.py`
  and `persistent.py` (tiles and their order); docs/kernel-notes.md draws how they work;
- of 8-bit operands: `quantise.py`, `quantised_operands.py`, `quantised_cache.py`;
- of launches: `launch.py`, `descriptors.py`, `tensor_maps.py`, `workspace.py`.

Suffixes: B batch, Hq query heads, Hkv key/value heads, H any heads, S sequence, D head dimension,
T tokens of all batch elements in a row.
"""
