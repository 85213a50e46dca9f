"""FlashAttention's and FlashInfer's own numeric tests, with our kernels in place of theirs."""
