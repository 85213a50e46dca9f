"""Model of one attention call: tensors, options, shape, mask structure and parts."""
