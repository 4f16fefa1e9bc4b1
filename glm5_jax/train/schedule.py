"""Schedules: the learning rate by step, and batch size, MTP weight and router-bias rate by tokens seen (paper section 2.2).

Tokens seen after a step are known before the run starts, so everything scheduled by tokens becomes a table over steps; the
train state counts steps only.
"""

import bisect
import dataclasses
import math
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import optax

from glm5_jax.config import check

# ((tokens, value), ...): the value from that many tokens seen on; the first entry starts at 0.
ByTokens = tuple[tuple[float, float], ...]


@dataclasses.dataclass(frozen=True)
class LearningRate:
    """Warm-up from 0 to `peak`, then a decay to `final` at the last step."""

    kind: Literal["cosine", "linear", "constant"] = "cosine"  # shape after the warm-up; constant stays at peak
    peak: float = 2e-4  # highest learning rate
    final: float = 4e-5  # learning rate at the last step (not for constant)
    warmup_steps: int = 100  # steps of linear warm-up from 0

    def __post_init__(self):
        check(self.peak > 0 and math.isfinite(self.peak), f"lr.peak={self.peak}: must be positive and finite")
        check(self.final >= 0 and math.isfinite(self.final), f"lr.final={self.final}: must be finite and not negative")
        check(self.warmup_steps >= 0, f"lr.warmup_steps={self.warmup_steps}: must not be negative")

    def schedule(self, steps: int) -> optax.Schedule:
        """Step (from 0) -> learning rate, for a run of `steps`."""
        warm = min(self.warmup_steps, steps)
        rest = max(steps - warm, 1)
        body = {
            "cosine": optax.cosine_decay_schedule(self.peak, rest, self.final / self.peak),
            "linear": optax.linear_schedule(self.peak, self.final, rest),
            "constant": optax.constant_schedule(self.peak),
        }[self.kind]
        # The first update already moves: step 0 uses peak / warmup_steps.
        ramp = optax.linear_schedule(self.peak / max(warm, 1), self.peak, max(warm - 1, 1))
        return optax.join_schedules([ramp, body], [warm])


class BatchPlan:
    """Rows and row length of each step's batch, and tokens seen before each step.

    The row length may rise within a run (mid-training, paper section 2.3). A micro-batch holds micro_rows x seq_len tokens
    throughout, cut into more rows while rows are short; so lengths change neither the tokens of a step nor its number of
    micro-batches.

    Args:
      rows: rows of `seq_len` tokens by tokens seen; each a positive multiple of `micro_rows`.
      micro_rows: rows of a micro-batch; a batch is rows / micro_rows of them.
      seq_len: tokens in a row (padding counts); the last of `lengths`.
      lengths: tokens in a row by tokens seen, rising; () = seq_len throughout.

    Raises:
      UserError: rows that are no multiple, lengths that do not rise to seq_len or do not divide a micro-batch.
    """

    def __init__(self, rows: ByTokens, micro_rows: int, seq_len: int, lengths: ByTokens = ()):
        check_by_tokens("batch_rows", rows)
        for _, value in rows:
            check(
                value == int(value) and value > 0 and value % micro_rows == 0,
                f"batch_rows={value:g}: must be a positive multiple of micro_rows={micro_rows}",
            )
        self._starts, self._rows, self._tokens, self._seq_len = [0], [int(rows[0][1])], [0], seq_len
        for tokens, value in rows[1:]:
            per_step = self._rows[-1] * seq_len
            steps = -(-max(int(tokens) - self._tokens[-1], 0) // per_step)
            self._starts.append(self._starts[-1] + steps)
            self._tokens.append(self._tokens[-1] + steps * per_step)
            self._rows.append(int(value))
        self._micro_tokens = micro_rows * seq_len
        self._lengths = self._check_lengths(lengths or ((0, seq_len),), micro_rows)
        self._length_starts = [self.step_of(tokens) for tokens, _ in lengths] or [0]

    def _check_lengths(self, lengths: ByTokens, micro_rows: int) -> list[int]:
        check_by_tokens("lengths", lengths)
        values = [value for _, value in lengths]
        check(
            all(a < b for a, b in zip(values, values[1:])) and values[-1] == self._seq_len,
            f"lengths={lengths}: must rise, the last one to data.seq_len={self._seq_len}",
        )
        for value in values:
            check(
                value == int(value) and value >= 2 and self._micro_tokens % value == 0,
                f"lengths={value:g}: must be an integer of at least 2 that divides the tokens of a micro-batch, "
                f"micro_rows={micro_rows} x data.seq_len={self._seq_len}",
            )
        return [int(value) for value in values]

    def phase_at(self, step: int) -> int:
        """Number, from 0, of the row length in force at `step`."""
        return bisect.bisect_right(self._length_starts, step) - 1

    def length_at(self, step: int) -> int:
        """Tokens in a row at `step`."""
        return self._lengths[self.phase_at(step)]

    def micro_rows_at(self, step: int) -> int:
        """Rows of a micro-batch of `step`."""
        return self._micro_tokens // self.length_at(step)

    def micro_batches_at(self, step: int) -> int:
        """Micro-batches in the batch of `step`."""
        return self._tokens_at(step) // self._micro_tokens

    def rows_at(self, step: int) -> int:
        """Rows of the batch of `step`."""
        return self._tokens_at(step) // self.length_at(step)

    def phases(self, steps: int) -> list[int]:
        """The first step of each row length that a run of `steps` comes to."""
        return sorted({step for step in self._length_starts if step < steps})

    def _tokens_at(self, step: int) -> int:
        return self._rows[bisect.bisect_right(self._starts, step) - 1] * self._seq_len

    def tokens_before(self, step: int) -> int:
        """Tokens seen before `step`."""
        i = bisect.bisect_right(self._starts, step) - 1
        return self._tokens[i] + (step - self._starts[i]) * self._rows[i] * self._seq_len

    def step_of(self, tokens: float) -> int:
        """First step before which at least `tokens` tokens were seen."""
        i = bisect.bisect_right(self._tokens, tokens) - 1
        return self._starts[i] + -(-max(int(tokens) - self._tokens[i], 0) // (self._rows[i] * self._seq_len))


def by_step(values: ByTokens, plan: BatchPlan, name: str) -> Callable[[jax.Array], jax.Array]:
    """Step -> float32 value of a schedule by tokens."""
    check_by_tokens(name, values)
    boundaries = jnp.array([min(plan.step_of(tokens), 2**31 - 1) for tokens, _ in values], jnp.int32)
    table = jnp.array([value for _, value in values], jnp.float32)
    return lambda step: table[jnp.sum(boundaries <= step) - 1]


def check_by_tokens(name: str, values: ByTokens) -> None:
    """Raises UserError unless the token counts start at 0 and rise, and all numbers are finite, none negative."""
    starts = [tokens for tokens, _ in values]
    rising = bool(starts) and starts[0] == 0 and all(a < b for a, b in zip(starts, starts[1:]))
    usable = all(math.isfinite(number) and number >= 0 for pair in values for number in pair)
    check(rising and usable, f"{name}={values}: pairs (tokens, value), finite and not negative, the tokens rising from 0")
