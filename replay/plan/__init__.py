"""Plans, which name the fastest kernel within an error budget for every layer."""
