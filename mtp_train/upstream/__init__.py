"""Undocumented parts of other libraries that this package uses: one module per library, every symbol in a table."""
