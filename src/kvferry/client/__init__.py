"""How instances are asked from outside: the legs of a request, and who is at a control port.

Shared by whoever drives instances: the router, the benchmarks and the doctor. Decides nothing.
"""
