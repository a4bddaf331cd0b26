"""Optional parts: the core names them as strings, as users' code is named, and imports none of them."""
