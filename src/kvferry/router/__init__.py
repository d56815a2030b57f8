"""The router: which instances take a request, and the two HTTP legs that carry it.

``request`` is the way of one request, and chooses its instances by pure functions over a snapshot
of the ``fleet``; ``history`` knows which of them holds a conversation. Knows the wire only: no
blocks, no transports, no tensors.
"""
