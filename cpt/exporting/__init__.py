"""Every way out of a run: whole, quantised, GGUF, the Hub; `cpt export`."""
