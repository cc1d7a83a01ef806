"""What all commands of one invocation share: the debug switch, the settings and the log."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass, field

from deepinfer.errors import ConfigurationError
from deepinfer.settings import LaunchedRank, Settings

_ROOT = "deepinfer"


@dataclass
class Session:
    """One invocation of the command.

    Attributes:
        debug: show tracebacks and log everything, whatever the environment says.
    """

    debug: bool = False
    _handler: logging.Handler | None = field(default=None, init=False)
    _level_before: int = field(default=logging.NOTSET, init=False)

    def start(self) -> Settings:
        """Read the environment and open the log on standard error; every command that does work calls this first."""
        settings = Settings.from_environment()
        logger = logging.getLogger(_ROOT)
        self._handler = logging.StreamHandler(sys.stderr)
        place = LaunchedRank.from_environment()
        prefix = "" if place is None else f"[rank {place.rank}] "
        self._handler.setFormatter(logging.Formatter(f"{prefix}%(levelname)s %(name)s: %(message)s"))
        self._level_before = logger.level
        logger.addHandler(self._handler)
        logger.setLevel("DEBUG" if self.debug else settings.log_level.upper())
        return settings

    def start_alone(self, command: str) -> Settings:
        """As :meth:`start`, for a command that is one process.

        Raises:
            ConfigurationError: a launcher has started several processes; each would do all of the work, and write it.
        """
        settings = self.start()
        if problems := alone_problems():
            raise ConfigurationError(command, problems)
        return settings

    def close(self) -> None:
        """Take the log down again, so that a caller in the same process finds logging as it was."""
        if self._handler is not None:
            logger = logging.getLogger(_ROOT)
            logger.removeHandler(self._handler)
            logger.setLevel(self._level_before)
            self._handler = None

    def shows_tracebacks(self) -> bool:
        """Return True when an error should come with its traceback."""
        try:
            return self.debug or Settings.from_environment().log_level == "debug"
        except ConfigurationError:  # it is the error being reported, or will be at the next command
            return False


def alone_problems() -> list[str]:
    """Return what speaks against work for one process: a launcher has started several."""
    place = LaunchedRank.from_environment()
    if place is None:
        return []
    return [
        f"WORLD_SIZE={place.world_size}: a launcher has started {place.world_size} processes, and this runs in one; "
        f"start it without the launcher, or unset WORLD_SIZE"
    ]
