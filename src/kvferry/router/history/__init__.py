"""Conversations: what a request is recognised by, and which instance holds its history."""
