"""How long it takes to compare many long runs."""
