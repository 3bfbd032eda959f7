"""Pure: points in, verdicts out. No clock, no input or output, no randomness."""
