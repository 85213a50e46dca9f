"""The vocabulary of one attention call: its tensors, options, shape, mask structure and parts."""
