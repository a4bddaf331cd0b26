"""The commands of `cpt data`: what is in the documents, and how documents are made."""
