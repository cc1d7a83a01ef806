"""Ranks: processes that each hold one member of a device group, and what they exchange.

A driver joins as any program under a launcher does: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT are set
before ``driver.collectives(world_size)`` is called.
"""
