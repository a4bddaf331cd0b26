"""What `cpt data rewrite` writes, and how it asks for it."""
