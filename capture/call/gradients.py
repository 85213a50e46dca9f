"""Names of the gradients of an attention call.

A gradient has the shape of its tensor. It is the gradient of this one call: what the call's own
backward returned for a tensor that the model may use elsewhere too.
"""

from __future__ import annotations

GRADIENTS = {
    "output": "grad_output",
    "query": "grad_query",
    "key": "grad_key",
    "value": "grad_value",
    "attn_mask": "grad_mask",
    "sinks": "grad_sinks",
}
"""Field of an `AttentionCall` with the gradient of each tensor."""

DIFFERENTIATED = ("query", "key", "value")
"""Inputs whose gradients kernels compute. Few kernels compute those of a mask or of sinks."""

GRADIENT_FIELDS = tuple(GRADIENTS.values())
