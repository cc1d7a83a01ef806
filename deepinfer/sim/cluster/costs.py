"""What a step of a group costs, in milliseconds."""

from __future__ import annotations

from dataclasses import dataclass, fields

from deepinfer.errors import ArgumentError


@dataclass(frozen=True, slots=True)
class CostModel:
    """Straight lines; a group's step takes as long as its slowest rank's.

    Defaults are fits to figures published for V4.1-Flash: decode on 64 ranks at 12 points, prefill through the two
    points 4,096 tokens in 68 ms and 32,768 tokens in 376 ms. They include the imbalance that those runs had.

    Attributes:
        decode_ms: a decode step without rows.
        decode_row_ms: each row of the rank that has most.
        prefill_ms: a prompt step without tokens.
        prefill_token_ms: each token of the rank that has most.
        expert_share: share of the growing terms that the busiest rank's experts stretch, in proportion to busiest over
            mean: an assumption, not a measurement.
        link_bytes_per_ms: what a rank receives in a millisecond while experts move and the group waits.
    """

    decode_ms: float = 8.8
    decode_row_ms: float = 0.0168
    prefill_ms: float = 24.0
    prefill_token_ms: float = 308 / 28_672
    expert_share: float = 0.5
    link_bytes_per_ms: float = 50e6

    def __post_init__(self) -> None:
        """Refuse negative costs, and a link or share that cannot be, all at once."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        problems = [f"{name} is {value}; 0 is the least" for name, value in values.items() if not value >= 0]
        if self.expert_share > 1:
            problems.append(f"expert_share is {self.expert_share}; 1 is the most")
        if self.link_bytes_per_ms == 0:
            problems.append("link_bytes_per_ms is 0; experts could never move")
        if problems:
            raise ArgumentError("cost model", problems)

    def decode_step_ms(self, most_rows: int, busiest_over_mean: float = 1.0) -> float:
        """Return the time of a decode step whose fullest rank has so many rows."""
        return self.decode_ms + self.decode_row_ms * most_rows * self._stretch(busiest_over_mean)

    def prefill_step_ms(self, most_tokens: int, busiest_over_mean: float = 1.0) -> float:
        """Return the time of a prompt step whose fullest rank has so many tokens."""
        return self.prefill_ms + self.prefill_token_ms * most_tokens * self._stretch(busiest_over_mean)

    def move_ms(self, most_received_bytes: int) -> float:
        """Return how long the group waits for the rank that receives most."""
        return most_received_bytes / self.link_bytes_per_ms

    def _stretch(self, busiest_over_mean: float) -> float:
        return 1 + self.expert_share * (busiest_over_mean - 1)
