"""Run a run again from its record, and say whether it is the same."""
