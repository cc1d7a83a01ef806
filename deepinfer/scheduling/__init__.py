"""Which requests run in the next step, how many positions each, in which memory; and what becomes of the result."""
