"""Who moves which blocks, and when: pure tables and planners, and one mover that does it.

Knows requests only by transfer id, pools only through ``ports``, transports only by their base
class. Never torch, never HTTP.
"""
