"""The router: which instances take a request, and the two HTTP legs that carry it.

Policy (``filters``, ``scorers``, ``picker``, ``decider``) is pure functions over an immutable
snapshot of the fleet; ``pipeline`` runs named steps over one request context; ``proxy`` passes
bytes on. Knows the wire only: no blocks, no transports, no tensors.
"""
