"""Ranks: where they meet, the groups that they form, how they vote, what they exchange."""
