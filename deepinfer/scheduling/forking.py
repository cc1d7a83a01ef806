"""Forks: a new request that starts with another one's whole history, and with its computed state if it can."""

from __future__ import annotations

from deepinfer.scheduling.config import EngineType, SchedulerConfig
from deepinfer.scheduling.roster import Roster
from deepinfer.scheduling.sequence import Sequence, StopRules
from deepinfer.scheduling.states import Place, Status


def child_of(parent: Sequence, child_id: str, stop_rules: StopRules) -> Sequence:
    """Return a request whose prompt is the whole history of ``parent``; its output starts afresh."""
    child = Sequence(
        child_id,
        parent.token_ids(0, parent.length),
        stop_rules,
        image_spans=parent.image_spans,
        chunk_checkpoints=parent.chunk_checkpoints,
        schedulable=parent.schedulable,
    )
    child.root_prompt_tokens = parent.root_prompt_tokens
    child.is_continuation = parent.is_continuation or parent.num_output_tokens > 0
    return child


def may_overtake(config: SchedulerConfig, roster: Roster) -> bool:
    """Say whether one more fork may take memory and a place before the requests that wait for both.

    As many may as can run at once; then one of those that wait is served first. Without the bound a user who keeps
    forking would starve everybody else.
    """
    if roster.num_waiting == 0:
        roster.forks_ahead = 0
    return roster.forks_ahead < config.max_num_seqs


def enqueue_child(
    parent: Sequence, child: Sequence, config: SchedulerConfig, roster: Roster, *, has_state: bool
) -> None:
    """Put a fork where its progress belongs.

    With the state of a decoding parent it waits for a decode step; with that of a half-computed prompt it goes to the
    front of the waiting queue. Without state, because the parent has none or is in flight, memory is short, or too
    many forks overtook the queue already, it queues behind everybody and computes its history itself.
    """
    if has_state:
        roster.forks_ahead += 1
        if parent.place is Place.WAITING or config.engine_type is EngineType.PROMPT:
            roster.enqueue(child, front=True)
        else:
            roster.await_decode(child)
    elif config.engine_type is EngineType.COMPLETION:
        roster.end(
            child,
            Status.FINISHED_PREEMPTED,
            text=f"no free block or state slot, or a step in flight, kept it from sharing the state of "
            f"{parent.request_id!r}, and this engine cannot recompute it",
        )
    else:
        roster.enqueue(child, front=False)
