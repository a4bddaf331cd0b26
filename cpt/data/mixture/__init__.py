"""Which row of which source is trained on when."""
