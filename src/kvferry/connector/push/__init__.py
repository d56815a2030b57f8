"""Handoff by push: the sender WRITEs into blocks that the receiver registers."""
