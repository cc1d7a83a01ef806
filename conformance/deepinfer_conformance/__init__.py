"""What a vendor runs to learn whether a driver may claim what it claims, and the drivers that test the engine itself.

Importing this package imports nothing heavy; ``deepinfer_conformance.drivers`` imports torch.
"""
