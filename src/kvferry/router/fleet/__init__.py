"""The instances of a router: their health, who they say they are, and what waits for them."""
