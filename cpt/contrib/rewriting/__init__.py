"""Let a model write training text: rewritten documents, and its own text for replay."""
