"""Documents of other formats (PDF, DOCX, EPUB, HTML) as text."""
