"""Handoff by pull: the receiver READs what the sender holds. Read-backs are received here, too."""
