"""Diagnosis of kernels that are wrong on recorded calls: experiments test hypotheses."""
