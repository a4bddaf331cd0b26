"""Extending the vocabulary for the demo's domain: what it does to lengths, and to bits per byte after equal bytes and
equal compute."""
