"""Measures a running deployment from outside, from raw timestamps of its HTTP answers.

Knows URLs, server-sent events and statistics; imports nothing of what it measures.
"""
