"""One request: what it asks, which instances it gets, its two legs, and how it has ended."""
