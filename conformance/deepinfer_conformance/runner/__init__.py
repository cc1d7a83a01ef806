"""Running cases: one in this process (`attempt`), many in child processes (`pool`)."""
