"""The small model that ships with the package: its world, its tokenizer, its training and its checkpoint."""
