"""Self-test: checks that this machine measures things with known answers correctly right now."""
