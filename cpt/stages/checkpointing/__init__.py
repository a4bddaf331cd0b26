"""A run's moment, saved and gone on from."""
