"""The process of one rank: it builds an engine and does what its pipe says, until the pipe or the group ends."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import torch

from deepinfer.engine.engine import Engine
from deepinfer.engine.ranks.building import build_rank
from deepinfer.engine.ranks.growth import RecordGrowth, Sender
from deepinfer.engine.ranks.messages import Beginning, ForkRequest, Parcel, RankFacts, Reply, portable
from deepinfer.parallel.ranks.groups import RankGroups
from deepinfer.settings import Settings

FAILED = 3
"""Exit status of a rank that could not go on."""


def main(descriptor: int) -> NoReturn:
    """Serve the pipe with this file descriptor, and end the process."""
    status = FAILED
    try:
        status = _run(descriptor)
    except Exception:
        logging.getLogger("deepinfer").exception("this rank has failed")
    finally:
        for written in (sys.stdout, sys.stderr):
            written.flush()
        # No orderly end of the groups: connections whose other ends have gone would only keep the process waiting.
        os._exit(status)


def _run(descriptor: int) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pipe: Connection[Any, Any] = Connection(descriptor)
    try:
        beginning: Beginning = pipe.recv()
        place = beginning.place
        place.enter()
        torch.set_num_threads(beginning.threads)
        _open_log(place.rank, beginning.log_level)
        pipe.send(Reply())
        pipe.recv()  # until every rank has come so far: deadlines measure the group, not the start of processes
        try:
            settings = Settings.from_environment()
            engine, groups = build_rank(place, beginning.model, beginning.accelerator, beginning.options, settings)
        except Exception as error:  # noqa: BLE001 - the parent raises it
            pipe.send(Reply(error=portable(error), is_fatal=True))
            return FAILED
        rules = engine.rules
        pipe.send(Reply(RankFacts(engine.config, engine.options, rules.max_model_len, rules.has_tokenizer)))
        return serve(pipe, engine, groups)
    except (EOFError, ConnectionError):  # the parent has gone
        return FAILED


def serve(pipe: Connection[Any, Any], engine: Engine, groups: RankGroups) -> int:
    """Answer commands until one is "close", or an error leaves this rank out of step with the others."""
    commands = _commands(engine, groups)
    while True:
        name, argument = pipe.recv()
        if name == "close":
            return _close(pipe, engine)
        try:
            reply = Reply(commands[name](argument))
        except Exception as error:  # noqa: BLE001 - the parent raises it
            reply = Reply(error=portable(error), is_fatal=groups.are_lost_by(error, in_step=name == "step"))
        pipe.send(reply)
        if reply.is_fatal:
            return FAILED


def _close(pipe: Connection[Any, Any], engine: Engine) -> int:
    try:
        engine.close()
    except Exception as error:  # noqa: BLE001 - the parent raises it
        pipe.send(Reply(error=portable(error), is_fatal=True))
        return FAILED
    pipe.send(Reply())
    return 0


def _commands(engine: Engine, groups: RankGroups) -> Mapping[str, Callable[[Any], object]]:
    def add(parcel: Parcel) -> None:
        submission = parcel.unpacked()
        engine.add_request(
            submission.request_id,
            submission.prompt_token_ids,
            submission.params,
            prompt=submission.prompt,
            image_spans=submission.image_spans,
            embeddings=submission.embeddings_PD,
        )

    sender = Sender()

    def step() -> list[RecordGrowth]:
        return sender.growths(engine.step())

    def discard(request_ids: Sequence[str]) -> None:
        engine.discard_requests(request_ids)
        sender.forget(request_ids)

    def fork(request: ForkRequest) -> None:
        engine.fork_request(request.parent_id, request.child_id, request.params)

    return {
        "add": add,
        "fork": fork,
        "abort": engine.abort_request,
        "discard": discard,
        "step": lambda _: step(),
        "stats": lambda _: engine.stats(),
        "balance": lambda _: engine.worker.balance,
        "check": lambda _: engine.check_invariants(),
        "votes": lambda _: groups.votes.cast,
    }


def _open_log(rank: int, level: int) -> None:
    logger = logging.getLogger("deepinfer")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"[rank {rank}] %(levelname)s %(name)s: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(level)
