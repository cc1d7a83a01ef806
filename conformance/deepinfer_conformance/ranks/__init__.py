"""Ranks: processes that each hold one member of a device group, and what they exchange.

A driver joins by ``join_group(place)`` alone. RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set as any
launcher sets them before the driver is made, for runtimes that choose a device of the machine by them.
"""
