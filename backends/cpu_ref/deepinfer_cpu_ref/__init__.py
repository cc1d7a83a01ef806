"""The reference driver `cpu_ref`: the meaning of every op, in readable torch."""
