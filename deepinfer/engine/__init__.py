"""The engine: options, admission, the step loop, the worker, answers and outputs."""
