"""Our own model families: each file is one architecture, thin over the transformers one that it equals."""
