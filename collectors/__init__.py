"""One file per place the truth comes from."""
