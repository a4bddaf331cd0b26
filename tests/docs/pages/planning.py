"""It takes longer than the others."""

SUITE = "long"
