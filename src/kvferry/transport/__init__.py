"""How bytes move between two instances' registered memory.

Knows addresses, blocks and peers' opaque metadata; no tensor, no request, no lease.
"""
