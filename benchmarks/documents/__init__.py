"""How well `cpt data ingest` keeps what is in documents."""
