"""The MTP head: its modules, its one forward step, and how depths line up with tokens."""
