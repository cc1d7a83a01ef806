"""What goes between the process that a user has and the processes of the ranks.

A command is ``(name, argument)``; every command is answered by one :class:`Reply`, in order.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any

import torch

from deepinfer.engine.admission import Submission
from deepinfer.engine.options import EngineOptions
from deepinfer.errors import DeepInferError
from deepinfer.model.config import ModelConfig
from deepinfer.sampling.params import SamplingParams
from deepinfer.settings import LaunchedRank


@dataclass(frozen=True, slots=True)
class Beginning:
    """The first message to a rank.

    Attributes:
        place: where it stands.
        model, accelerator, options: as for ``build_engine``.
        threads: how many torch may use in it.
        log_level: of the log that it writes on standard error.
    """

    place: LaunchedRank
    model: str | PathLike[str] | None
    accelerator: str | None
    options: EngineOptions
    threads: int
    log_level: int


@dataclass(frozen=True, slots=True)
class RankFacts:
    """What a rank says of itself when it is ready; equal on all ranks.

    Attributes:
        config: the model.
        options: the engine's options, completed by the environment.
        max_model_len: positions that a request may hold.
        has_tokenizer: whether there is a tokenizer.
    """

    config: ModelConfig
    options: EngineOptions
    max_model_len: int
    has_tokenizer: bool


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer to a command.

    Attributes:
        value: what it gave.
        error: what it raised instead.
        is_fatal: the rank can take part in no further step.
    """

    value: Any = None
    error: BaseException | None = None
    is_fatal: bool = False


@dataclass(frozen=True, slots=True)
class ForkRequest:
    """The argument of "fork"."""

    parent_id: str
    child_id: str
    params: SamplingParams | None


@dataclass(frozen=True, slots=True)
class Parcel:
    """A submission whose embeddings travel as bytes, not as shared memory.

    Attributes:
        submission: everything else.
        embeddings: what torch has saved of them; None for none.
    """

    submission: Submission
    embeddings: bytes | None

    @classmethod
    def of(cls, submission: Submission) -> Parcel:
        """Pack."""
        if submission.embeddings_PD is None:
            return cls(submission, None)
        saved = io.BytesIO()
        torch.save(submission.embeddings_PD.cpu().clone(), saved)
        return cls(replace(submission, embeddings_PD=None), saved.getvalue())

    def unpacked(self) -> Submission:
        """Unpack."""
        if self.embeddings is None:
            return self.submission
        embeddings_PD = torch.load(io.BytesIO(self.embeddings), weights_only=True)
        return replace(self.submission, embeddings_PD=embeddings_PD)


def portable(error: BaseException) -> BaseException:
    """Return the error if it survives the way to another process, else one of ours that says the same."""
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301 - what was pickled a moment ago
    except Exception:  # noqa: BLE001 - any failure of an unknown type's own code means the same
        return DeepInferError(f"{type(error).__name__}: {error}")
    return error
