"""Block-sparse attention: errors of each head on recorded calls, and a setting for each head."""
