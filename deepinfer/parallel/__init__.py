"""Experts over ranks: placement as data, load counts, balancing policies, and what a change of layout moves.

Pure host code over numpy integers, so that every rank computes the same plan bit for bit; nothing here communicates.
"""
