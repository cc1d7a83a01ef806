"""Cache memory: who owns which block and state slot, how bytes lie in them, and where a position is written."""
