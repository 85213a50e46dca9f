"""Self-test: does this machine measure things with known answers correctly right now?"""
