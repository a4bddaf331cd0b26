"""Which documents stay, and what is changed in them."""
