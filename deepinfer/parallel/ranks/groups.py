"""The groups to which a rank belongs, and how they are formed.

All ranks are one *host group*, which votes; it runs over the reference driver's collectives between hosts, whatever the
device. A second group between the hosts of all ranks, the *table group*, fetches rows of n-gram tables where these are
spread. Consecutive ranks form *expert groups*, among which the experts of a layer are spread, and *context groups*,
which have the same requests and share the rows of prompts; these run over the driver's own collectives. Attention is
data parallel: every context group, of one rank by default, has its own requests and caches.
"""

from __future__ import annotations

import datetime
import socket
from dataclasses import dataclass
from typing import Final

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, not re-exported

from deepinfer.accelerator import AcceleratorDriver, LostRanksError, RankPlace, registry
from deepinfer.accelerator.plan import REFERENCE
from deepinfer.errors import ArgumentError, RankFailedError
from deepinfer.parallel.ranks.messages import all_gather_bytes
from deepinfer.parallel.ranks.recording import NamedGroup, Recorder
from deepinfer.parallel.ranks.votes import HostVotes
from deepinfer.settings import LaunchedRank

_KEY: Final = "deepinfer/host group"


@dataclass(frozen=True, slots=True)
class RankGroups:
    """One rank's groups.

    Attributes:
        place: where the rank stands.
        host: all ranks, between hosts.
        votes: the host group's agreements.
        experts: the ranks among which experts are spread; None where every rank holds all of them.
        deadline_s: seconds within which every rank must join every exchange.
        tables: all ranks, between hosts, where they hold the n-gram tables together; None where each holds all.
        context: the ranks that share the rows of prompts; None where every rank has requests of its own.
    """

    place: LaunchedRank
    host: NamedGroup
    votes: HostVotes
    experts: NamedGroup | None
    deadline_s: float
    tables: NamedGroup | None = None
    context: NamedGroup | None = None

    @property
    def rank(self) -> int:
        """This rank's number in the world."""
        return self.place.rank

    @property
    def world_size(self) -> int:
        """All ranks."""
        return self.place.world_size

    @property
    def is_broken(self) -> bool:
        """Whether an exchange of a group has failed."""
        groups = (self.host, self.experts, self.tables, self.context)
        return any(group is not None and group.is_broken for group in groups)

    @property
    def exchanges_in_steps(self) -> bool:
        """Whether the layers of a step wait for other ranks, beside the votes."""
        return any(group is not None for group in (self.experts, self.tables, self.context))

    def are_lost_by(self, error: BaseException, *, in_step: bool) -> bool:
        """Say whether this rank can take part in nothing any more, because the others wait in vain, or have gone.

        Args:
            error: what a call has raised here.
            in_step: the call was a step of the engine; its layers may have left out an exchange.
        """
        if self.is_broken or isinstance(error, (LostRanksError, RankFailedError)):
            return True
        return in_step and self.exchanges_in_steps


def group_problems(world_size: int, expert_parallel_size: int, context_parallel_size: int = 1) -> list[str]:
    """Return why so many ranks cannot form groups of these sizes."""
    sizes = {"expert": expert_parallel_size, "context": context_parallel_size}
    return [
        f"{purpose}_parallel_size={size} does not divide the {world_size} ranks; every {purpose} group has equally many"
        for purpose, size in sizes.items()
        if size < 1 or world_size % size
    ]


def join_groups(
    place: LaunchedRank,
    driver: AcceleratorDriver,
    *,
    expert_parallel_size: int,
    deadline_s: float,
    context_parallel_size: int = 1,
    spreads_tables: bool = False,
    recorder: Recorder | None = None,
) -> RankGroups:
    """Join all groups of a rank; every rank of the world does so at the same time.

    Args:
        place: what the launcher said.
        driver: this rank's own.
        expert_parallel_size: ranks of an expert group, 1 for none.
        deadline_s: seconds to wait for the others, here and in every exchange.
        context_parallel_size: ranks of a context group, 1 for none.
        spreads_tables: whether the ranks hold the n-gram tables together.
        recorder: notes every exchange; None for nobody.

    Raises:
        ArgumentError: the groups cannot be formed.
        LostRanksError: ranks did not come within the deadline.
    """
    if problems := group_problems(place.world_size, expert_parallel_size, context_parallel_size):
        raise ArgumentError("groups of ranks", problems)
    # Each of the steps before a group's own deadline begins may take as long, because ranks load at different speed.
    seat = RankPlace(place.rank, place.world_size, _host_address(place, deadline_s), deadline_s)
    reference, everybody = registry.load(REFERENCE)(), range(place.world_size)
    host = NamedGroup(reference.join_group(seat), "host", everybody, recorder)
    tables: NamedGroup | None = None
    if spreads_tables:
        # Not the host group itself: a device's queue fetches rows while the engine votes on the next step.
        meeting = all_gather_bytes(host, _free_address(place).encode())[0].decode()
        own = RankPlace(place.rank, place.world_size, meeting, deadline_s)
        tables = NamedGroup(reference.join_group(own), "table", everybody, recorder)

    def neighbours(purpose: str, size: int) -> NamedGroup | None:
        if size == 1:
            return None
        first = place.rank // size * size
        # Agreed by all ranks at once, though every group needs one address only: nobody waits for a group of others.
        addresses = all_gather_bytes(host, _free_address(place).encode())
        own = RankPlace(place.rank - first, size, addresses[first].decode(), deadline_s)
        return NamedGroup(driver.join_group(own), purpose, range(first, first + size), recorder)

    experts = neighbours("expert", expert_parallel_size)
    context = neighbours("context", context_parallel_size)
    return RankGroups(place, host, HostVotes(host), experts, deadline_s, tables, context)


def free_port() -> int:
    """Return a port of this machine that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _host_address(place: LaunchedRank, deadline_s: float) -> str:
    """Return where the host group meets: at the launcher's port, or where rank 0 says in the launcher's store."""
    if not place.has_store:
        return _address(place.host, place.port)
    key = f"{_KEY} {place.attempt}"
    limit = datetime.timedelta(seconds=deadline_s)
    try:
        store = TCPStore(place.host, place.port, place.world_size, False, limit)  # noqa: FBT003 - not the holder
        if place.rank == 0:
            store.set(key, _address(place.host, free_port()))
        store.wait([key], limit)
        return store.get(key).decode()
    except RuntimeError as error:
        name = f"host group of {place.world_size} ranks at {place.host}:{place.port}"
        raise LostRanksError(name, (0,), f"rank {place.rank} finds no address in the launcher's store: {error}") from (
            error
        )


def _free_address(place: LaunchedRank) -> str:
    """Return an address of this machine as the others see it, with a free port."""
    with socket.socket(_family(place.host), socket.SOCK_DGRAM) as probe:
        probe.connect((place.host, place.port))  # sends nothing; it chooses the interface towards rank 0
        return _address(str(probe.getsockname()[0]), free_port())


def _family(host: str) -> socket.AddressFamily:
    return socket.getaddrinfo(host, None)[0][0]


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
