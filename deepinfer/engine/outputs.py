"""What a user gets back: one record per request, one completion per sibling."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from deepinfer.engine.draft_tally import ChanceRange
from deepinfer.engine.growing import GrowingField
from deepinfer.scheduling.step import ScheduledStep

FinishReason = Literal[
    "stop",
    "length",
    "abort",
    "insufficient_system_resource",
    "grammar_failed",
    "image_failed",
    "invalid",
    "ignored",
]


@dataclass(frozen=True)
class CompletionOutput:
    """One answer, as it was when its record was made.

    Attributes:
        index: number of the sibling, 0 for n = 1.
        text: the text so far, without the stop string unless it was asked for; empty without a tokenizer.
        token_ids: emitted ids, the stop token included.
        logprobs: one mapping from id to log-probability per emitted token, the chosen id always in it; None unless
            asked for.
        finish_reason: None while the answer grows; the words are explained in docs/finish-reasons.md.
        stop_reason: the stop string or stop id that ended the answer; None for the end token and other reasons.
        message: why the request was refused or failed, in words; None otherwise.
    """

    index: int
    text: str
    token_ids: GrowingField[tuple[int, ...]] = GrowingField()  # noqa: RUF009 - a descriptor, not a value
    logprobs: GrowingField[tuple[Mapping[int, float], ...] | None] = GrowingField()  # noqa: RUF009 - a descriptor, not a value
    finish_reason: FinishReason | None  # type: ignore[misc]  # the two fields above have no default, see GrowingField
    stop_reason: str | int | None = None
    message: str | None = None

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum of the log-probabilities of the emitted tokens; None unless log-probabilities were asked for."""
        if self.logprobs is None:
            return None
        return sum(entry[token] for token, entry in zip(self.token_ids, self.logprobs, strict=True))

    def finished(self) -> bool:
        """Return whether the answer grows no more."""
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The state of one request after a step; the terminal one has ``finished`` set.

    Attributes:
        request_id: the caller's id.
        prompt: the prompt as text, None when it was given as ids.
        prompt_token_ids: the prompt as ids.
        prompt_logprobs: one mapping per prompt position, the first entry None; None unless asked for, and while the
            prompt is not computed.
        outputs: one completion per sibling, by index.
        finished: no further record of this request will come.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    prompt_logprobs: tuple[Mapping[int, float] | None, ...] | None
    outputs: tuple[CompletionOutput, ...]
    finished: bool

    def as_json(self) -> dict[str, object]:
        """Return the line that ``deepinfer generate --json`` prints."""
        completions: list[dict[str, object]] = []
        for output in self.outputs:
            line: dict[str, object] = {
                "index": output.index,
                "text": output.text,
                "token_ids": list(output.token_ids),
                "finish_reason": output.finish_reason,
            }
            if output.stop_reason is not None:
                line["stop_reason"] = output.stop_reason
            if output.message is not None:
                line["message"] = output.message
            if output.logprobs is not None:
                line["logprobs"] = [{str(token): value for token, value in entry.items()} for entry in output.logprobs]
            completions.append(line)
        record: dict[str, object] = {"request_id": self.request_id, "outputs": completions}
        if self.prompt_logprobs is not None:
            record["prompt_logprobs"] = [
                None if entry is None else {str(token): value for token, value in entry.items()}
                for entry in self.prompt_logprobs
            ]
        return record


@dataclass(frozen=True, slots=True)
class RowRecord:
    """One request's share of a step.

    Attributes:
        request_id: whose rows they were (the sibling's own id for n > 1).
        cached: positions computed before the step.
        q: positions computed in the step.
        k: ``cached + q``.
        block_table: its blocks during the step, in order of positions.
        state_slot: its state slot.
    """

    request_id: str
    cached: int
    q: int
    k: int
    block_table: tuple[int, ...]
    state_slot: int


@dataclass(frozen=True, slots=True)
class StepTimes:
    """What an engine's steps cost so far, in seconds.

    Attributes:
        called_s: in calls of ``Engine.step``.
        waited_s: the part of it in which the host waited for the device; the rest is the host's own work.
        device_s: the device's work of the steps that were read; None where the driver does not measure it.
    """

    called_s: float
    waited_s: float
    device_s: float | None

    @property
    def host_s(self) -> float:
        """The host's own work."""
        return self.called_s - self.waited_s

    def since(self, earlier: StepTimes) -> tuple[float, float | None]:
        """Return what the host and the device have worked since ``earlier``."""
        both = (self.device_s, earlier.device_s)
        device_s = None if both[0] is None or both[1] is None else both[0] - both[1]
        return self.host_s - earlier.host_s, device_s


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What a step did: "prefill", "decode" or "empty", and its rows in scheduled order."""

    kind: Literal["prefill", "decode", "empty"]
    rows: tuple[RowRecord, ...]

    @classmethod
    def of(cls, step: ScheduledStep) -> StepRecord:
        """Describe a scheduled step."""
        rows = zip(
            step.sequences,
            step.cached_R.tolist(),
            step.q_R.tolist(),
            step.k_R.tolist(),
            step.block_table_RB.tolist(),
            step.state_slot_R.tolist(),
            strict=True,
        )
        return cls(
            step.kind,
            tuple(
                RowRecord(sequence.request_id, cached, q, k, tuple(filter(None, blocks)), slot)  # 0 fills up a table
                for sequence, cached, q, k, blocks, slot in rows
            ),
        )


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counts of the engine as it stands between steps.

    Attributes:
        free_blocks: blocks that nobody owns.
        free_state_slots: state slots that nobody owns.
        num_waiting: requests that wait for admission or for their next chunk, siblings counted one by one.
        num_running: requests that decode, siblings counted one by one.
        num_unfinished: requests whose terminal record has not been handed out, siblings counted one by one.
        usable_blocks: blocks of the pool that can be owned.
        usable_state_slots: state slots that can be owned.
        max_model_len: positions that one request may hold.
        longest_request: positions of the longest request that the pool can finish.
        steps: steps run so far, of any kind.
        emitted_tokens: tokens emitted so far.
        drafted_tokens: drafts verified so far, placeholders not counted.
        accepted_tokens: how many of them were accepted.
        preemptions: how often requests were preempted so far.
        replayed_steps: decode steps that ran from a recorded graph.
        verified_by_place: drafts verified so far, by their place among those of a request.
        accepted_by_place: how many of them were accepted, which takes that all before them were.
        confidence_error: how far the chances that the draft model gave lie from what was accepted: the distance at each
            place, summed, as a share of the verified drafts.
        chance_ranges: the verified drafts by the chance that the draft model gave them, ten equal ranges from 0 on.
    """

    free_blocks: int
    free_state_slots: int
    num_waiting: int
    num_running: int
    num_unfinished: int
    usable_blocks: int
    usable_state_slots: int
    max_model_len: int
    longest_request: int
    steps: int
    emitted_tokens: int
    drafted_tokens: int
    accepted_tokens: int
    preemptions: int
    replayed_steps: int = 0
    verified_by_place: tuple[int, ...] = ()
    accepted_by_place: tuple[int, ...] = ()
    confidence_error: float = 0.0
    chance_ranges: tuple[ChanceRange, ...] = ()
