"""The command line: a parser and one function per command, each a call of the public Python API."""
