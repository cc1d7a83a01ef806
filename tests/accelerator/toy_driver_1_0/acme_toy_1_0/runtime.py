"""What stands for Acme's runtime library."""

VERSION = "3.1"


def device_count() -> int:
    return 1
