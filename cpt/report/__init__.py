"""A run's whole story in one HTML file, made of what its folder holds."""
