"""For how long blocks are promised, and to which readers."""
