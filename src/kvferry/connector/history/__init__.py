"""Read-back, the holder's side: what a reader may have of the conversations that are retained."""
