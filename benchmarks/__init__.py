"""Every number in a document has its command here."""
