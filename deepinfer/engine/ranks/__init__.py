"""Engines that run their steps together: one process each, behind the face of one engine."""
