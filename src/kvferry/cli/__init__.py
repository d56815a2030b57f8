"""The command line: one file per command. The only place that reads environment variables.

Knows how to start things and what to print; knows nothing of how they work.
"""
