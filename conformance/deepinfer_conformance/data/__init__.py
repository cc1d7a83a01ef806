"""Inputs as data: seeded values, calls, digests, and their way to a device and back."""
