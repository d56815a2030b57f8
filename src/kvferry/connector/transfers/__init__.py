"""One object a transfer, found by its id, and what all roles share. Pure."""
