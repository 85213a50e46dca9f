"""Whether this machine, as it is now, measures right: things with known answers are measured."""
