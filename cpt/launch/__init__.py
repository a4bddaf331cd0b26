"""Start a run on one machine or several, and watch it."""
