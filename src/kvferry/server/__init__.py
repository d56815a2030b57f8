"""One instance: OpenAI's API over an engine, its connector and its transport.

Owns HTTP, text and the wiring of one instance. Knows no tensor and no transport by name.
"""
