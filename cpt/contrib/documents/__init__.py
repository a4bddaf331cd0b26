"""Turn PDF, DOCX, EPUB and HTML files into text."""
