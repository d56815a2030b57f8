"""The wire between instances: ids, KV geometry, block hashes, parameters and messages.

Knows no network, no tensor and no other package of kvferry but ``errors``.
"""
