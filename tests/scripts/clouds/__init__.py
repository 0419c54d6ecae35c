"""A package whose modules train."""
