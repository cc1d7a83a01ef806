"""A group of ranks in one process: real schedulers and balancing policies, with a cost model in place of devices."""
