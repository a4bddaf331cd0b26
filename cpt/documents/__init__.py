"""Documents that are not text yet (PDF, HTML, DOCX, EPUB), turned into jsonl that a recipe's source reads."""
