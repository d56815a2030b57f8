"""The wire between instances: ids, KV geometry, block hashes, parameters and messages.

Knows no network, no tensor and nothing else of kvferry but ``errors`` and ``options``.
"""
