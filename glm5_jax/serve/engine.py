"""Rollout engine: continuous batching over a fixed number of slots, with guesses of the MTP layer (paper sections 2.1, 4.1).

    engine = Engine(model, slots=32, context=4096, draft_steps=3)
    completions = engine.generate([Request(prompt, max_new_tokens=512, seed=i) for i, prompt in enumerate(prompts)])

All shapes are static: admitting or finishing a request never compiles. Three programs run: prompts are read in chunks, a slot's
keys are copied to another slot whose request begins with the same tokens, and all slots decode together, several tokens a call.

A token is decided by its request's seed and its position alone (`serve/sampling.py`), so a request's tokens depend neither on
its neighbours nor on guesses: the MTP layer guesses tokens by the same random numbers, the network then draws its own at all
these positions at once, and what was guessed right costs no further pass. Keys of wrong guesses are overwritten.

The last token of a request has no keys yet: it is what the next pass reads. So reading a prompt needs no logits.
"""

import collections
import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from glm5_jax.compiling import jit
from glm5_jax.config import check
from glm5_jax.layers.block import NOTHING, Memory
from glm5_jax.model import Cache, Glm5, abstract, check_tokens, empty_cache, empty_keys, merge, split, unstack
from glm5_jax.serve.sampling import Draw, choose, log_probs

_MOST_STOPS = 8  # ids that can end a request
_CHUNKS = (16, 64, 256, 1024)  # sizes in which prompts are read
_PASSES = 8  # of decoding in one call, at most


@dataclasses.dataclass(frozen=True)
class Request:
    """What to generate.

    tokens: int [n], the prompt, at least one token. max_new_tokens: cut to what the engine's context has room for.
    temperature, top_p, top_k: see `Draw`. seed: of the draws. stop: ids that end it; None = the model's.
    """

    tokens: np.ndarray
    max_new_tokens: int = 64
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    stop: tuple[int, ...] | None = None

    def __post_init__(self):
        tokens = np.asarray(self.tokens)
        check(tokens.ndim == 1 and tokens.size > 0, f"tokens: shape {tokens.shape}, need at least one token [n]")
        check(np.issubdtype(tokens.dtype, np.integer), f"tokens: dtype {tokens.dtype}, need integers")
        object.__setattr__(self, "tokens", tokens.astype(np.int32))
        check(self.max_new_tokens >= 1, f"max_new_tokens={self.max_new_tokens}: must be at least 1")
        check(0 <= self.temperature < np.inf, f"temperature={self.temperature}: must be finite and not negative")
        check(0 < self.top_p <= 1, f"top_p={self.top_p}: must lie in (0, 1]")
        check(self.top_k >= 0, f"top_k={self.top_k}: must not be negative")
        check(0 <= self.seed < 1 << 32, f"seed={self.seed}: must lie in 0..2^32-1")
        check(len(self.stop or ()) <= _MOST_STOPS, f"stop: {len(self.stop or ())} ids, at most {_MOST_STOPS}")


@dataclasses.dataclass
class Completion:
    """What came of a request.

    tokens: int32 [m], the stop token included. logprobs: float32 [m], of each under the distribution it was drawn from.
    versions: int32 [m], of the weights that drew it. finish: "stop", "length" or "abort".
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    finish: str


class Slots(NamedTuple):
    """What decoding knows of each slot, arrays [B].

    pending: int32, its last token. length: int32, tokens with keys. left: int32, tokens it may still make, 0 = idle.
    drafts: int32 [B,n], guesses of the tokens after `pending`, -1 = none. stops: int32 [B,8], -1 = none. draw: `Draw`.
    """

    pending: jax.Array
    length: jax.Array
    left: jax.Array
    drafts: jax.Array
    stops: jax.Array
    draw: Draw


class Keys(NamedTuple):
    """Cached keys of the trunk's layers and of the MTP layer (None without guesses), arrays [1,B,S,...] and [B,S,...]."""

    trunk: tuple
    mtp: tuple | None


class Passes(NamedTuple):
    """What up to `_PASSES` passes made: tokens, logprobs [passes,B,n+1], of which `made` [passes,B] count; number of passes."""

    tokens: jax.Array
    logprobs: jax.Array
    made: jax.Array
    number: jax.Array


@dataclasses.dataclass
class _Job:
    """A request on its way. prompt: what is to be read, the request's tokens and, after an update, what it has made."""

    id: int
    request: Request
    tokens: list = dataclasses.field(default_factory=list)
    logprobs: list = dataclasses.field(default_factory=list)
    versions: list = dataclasses.field(default_factory=list)
    limit: int = 0

    def all_tokens(self) -> np.ndarray:
        return np.concatenate([self.request.tokens, np.asarray(self.tokens, np.int32)])


class Engine:
    """See the file's first lines.

    Args of the constructor:
      model: the network with weights. slots: requests that run together. context: most tokens of a request, prompt included.
      draft_steps: tokens that the MTP layer guesses ahead; 0 = none. version: of the weights.
    """

    def __init__(self, model: Glm5, slots: int = 8, context: int = 1024, draft_steps: int = 0, version: int = 0):
        cfg = model.cfg
        check(slots >= 1, f"slots={slots}: must be at least 1")
        limit = cfg.max_position_embeddings
        check(2 <= context <= limit, f"context={context}: must lie in 2..{limit}, the model's position limit")
        check(draft_steps >= 0, f"draft_steps={draft_steps}: must not be negative")
        check(not draft_steps or model.mtp is not None, "draft_steps: the model has no MTP layer to guess with")
        self.cfg, self.slots, self.context, self.draft_steps, self.version = cfg, slots, context, draft_steps, version
        self._graphdef = split(abstract(cfg, type(model), scanned=False))[0]
        self.params = _unstack(split(model)[1], cfg)
        trunk = empty_cache(cfg, slots, context, scanned=False).keys
        self._keys = Keys(trunk, empty_keys(cfg, (slots, context), (slots, context)) if draft_steps else None)
        self._jobs: list[_Job | None] = [None] * slots
        self._held = [np.zeros(0, np.int32)] * slots  # tokens whose keys a slot holds, the pending one behind them
        self._used = [0] * slots  # when a slot was last taken
        self._waiting: collections.deque[_Job] = collections.deque()
        self._reading: collections.deque[tuple[int, _Job]] = collections.deque()  # slots whose prompt is yet to be read
        self._done: dict[int, Completion] = {}
        self._ids, self._clock = itertools.count(), itertools.count(1)
        self._state = _idle(slots, draft_steps)
        self._last = time.monotonic()
        self.counts = collections.Counter()  # passes, tokens, read, copied; accepted1.. and guessed, by depth

    # What a trainer calls

    def generate(self, requests: Iterable[Request], progress: Callable[[int], None] | None = None) -> list[Completion]:
        """Runs requests to their end, in the order given. progress: called with the number of tokens made so far."""
        ids = [self.submit(request) for request in requests]
        while any(i not in self._done for i in ids):
            self.step()
            if progress:
                progress(self.counts["tokens"])
        return [self._done.pop(i) for i in ids]

    def submit(self, request: Request) -> int:
        """Queues a request; the id under which `take` finds it.

        Raises:
          UserError: a prompt that leaves no room for a token, ids outside the vocabulary.
        """
        n = len(request.tokens)
        check(n < self.context, f"prompt of {n} tokens: the engine's context is {self.context}, with what is generated")
        check_tokens(request.tokens[None], self.cfg)
        job = _Job(next(self._ids), request, limit=min(request.max_new_tokens, self.context - n))
        self._waiting.append(job)
        return job.id

    def take(self, i: int) -> Completion | None:
        """The completion of a request, once; None while it runs."""
        return self._done.pop(i, None)

    def abort(self, i: int) -> None:
        """Ends a request; its completion has what it made so far. Nothing happens if it is done already."""
        for job in [*self._waiting, *(job for job in self._jobs if job)]:
            if job.id == i:
                self._waiting = collections.deque(j for j in self._waiting if j is not job)
                self._reading = collections.deque((s, j) for s, j in self._reading if j is not job)
                if job in self._jobs:
                    slot = self._jobs.index(job)
                    self._jobs[slot], self._state.left[slot] = None, 0
                self._finish(job, "abort")

    def update(self, version: int, params: dict) -> None:
        """New weights, nested dict as of `split`. Running requests go on with them: their tokens are read again.

        Raises:
          UserError: a version that is not newer than the present one.
        """
        check(version > self.version, f"version={version}: the engine has version {self.version} already")
        self.params, self.version = _unstack(params, self.cfg), version
        self._held = [np.zeros(0, np.int32)] * self.slots
        self._used = [0] * self.slots  # nothing of before decides anything now, not even who gets which slot
        self._state.left[:] = 0
        self._reading = collections.deque((slot, job) for slot, job in enumerate(self._jobs) if job)

    def forget(self) -> None:
        """Forgets keys and counts: the bits of what follows are those of a new engine.

        Raises:
          UserError: requests are running or waiting.
        """
        check(not self._waiting and not any(self._jobs), "forget: requests are running or waiting")
        self._held, self._used = [np.zeros(0, np.int32)] * self.slots, [0] * self.slots
        self._clock, self._state = itertools.count(1), _idle(self.slots, self.draft_steps)
        self.counts.clear()

    def health(self) -> dict:
        """What a monitor wants: version, requests running and waiting, seconds since the last step, counts."""
        running = sum(job is not None for job in self._jobs)
        idle = time.monotonic() - self._last
        return {"version": self.version, "running": running, "waiting": len(self._waiting), "idle_s": idle, **self.counts}

    def acceptance(self) -> dict[str, float]:
        """Share of guesses that were right at each depth, `acceptance_1`.., and `accepted_length`, tokens made by a pass of a
        row."""
        rows = max(self.counts["rows"], 1)
        depths = {f"acceptance_{d}": self.counts[f"accepted_{d}"] / rows for d in range(1, self.draft_steps + 1)}
        return depths | {"accepted_length": self.counts["tokens"] / rows}

    # One turn

    def step(self) -> None:
        """Admits what waits, reads at most one large chunk of prompts, and decodes a few tokens in all running slots."""
        while self._waiting and None in self._jobs:
            self._admit(self._waiting.popleft())
        budget = _CHUNKS[-1]
        while self._reading and budget > 0:
            budget -= self._read(*self._reading[0])
        if self._state.left.any():
            self._decode()
        self._last = time.monotonic()

    def _admit(self, job: _Job) -> None:
        """Takes the free slot that shares most tokens with the request, of several the one not used for longest."""
        free = [slot for slot, other in enumerate(self._jobs) if other is None]
        prompt = job.request.tokens
        slot = max(free, key=lambda slot: (self._shared(prompt, slot), -self._used[slot]))
        self._jobs[slot], self._used[slot] = job, next(self._clock)
        self._reading.append((slot, job))

    def _shared(self, tokens: np.ndarray, slot: int) -> int:
        """How many tokens' keys in a slot are those of a request with these tokens.

        The MTP layer's keys depend on one token more; the last token has none.
        """
        held = self._held[slot]
        n = min(len(held), len(tokens))
        differs = np.flatnonzero(held[:n] != tokens[:n])
        return max(0, (int(differs[0]) if differs.size else n) - 1)

    def _read(self, slot: int, job: _Job) -> int:
        """Reads the next chunk of a prompt, or copies the beginning from another slot; the number of tokens read."""
        tokens = job.all_tokens()
        own = self._shared(tokens, slot)
        best = max(range(self.slots), key=lambda other: self._shared(tokens, other))
        shared = self._shared(tokens, best)
        if shared > own:
            self._keys = _copy(self._keys, best, slot)
            self._held[slot] = tokens[: shared + 1]
            self.counts["copied"] += shared - own
            own = shared
        todo = len(tokens) - 1 - own
        count = 0
        if todo:
            size = _chunk(todo)
            count = min(size, todo)
            chunk = np.zeros((2, 1, size), np.int32)
            chunk[0, 0, :count], chunk[1, 0, :count] = tokens[own : own + count], tokens[own + 1 : own + 1 + count]
            self._keys = _prefill(self._graphdef, self.params, self._keys, slot, own, count, *chunk)
            self._held[slot] = tokens[: own + count + 1]
            self.counts["read"] += count
        if count == todo:
            self._reading.popleft()
            self._start(slot, job, tokens)
        return count

    def _start(self, slot: int, job: _Job, tokens: np.ndarray) -> None:
        state, r = self._state, job.request
        state.pending[slot], state.length[slot] = tokens[-1], len(tokens) - 1
        state.left[slot], state.drafts[slot] = job.limit - len(job.tokens), -1
        stops = self.cfg.eos_token_id if r.stop is None else r.stop
        state.stops[slot] = [*stops, *[-1] * (_MOST_STOPS - len(stops))]
        for setting, value in zip(state.draw, (r.temperature, r.top_p, r.top_k, r.seed)):
            setting[slot] = value

    def _decode(self) -> None:
        before = self._state
        self._keys, after, passes = _decode(
            self._graphdef, self.params, self._keys, before, bool(self._waiting), self.draft_steps
        )
        tokens, logprobs, made, number = jax.device_get(passes)
        self._state = jax.tree.map(np.array, jax.device_get(after))
        tokens, logprobs, made = tokens[:number], logprobs[:number], made[:number]
        for slot in np.flatnonzero(before.left):
            job, kept = self._jobs[slot], np.arange(tokens.shape[2]) < made[:, slot, None]
            new = tokens[:, slot][kept]
            job.tokens += new.tolist()
            job.logprobs += logprobs[:, slot][kept].tolist()
            job.versions += [self.version] * len(new)
            self._held[slot] = np.concatenate([self._held[slot], new])
            if not self._state.left[slot]:
                self._jobs[slot] = None
                self._finish(job, "stop" if new[-1] in before.stops[slot] else "length")
        self.counts["tokens"] += int(made.sum())
        self.counts["rows"] += int((made > 0).sum())
        for depth in range(1, self.draft_steps + 1):
            self.counts[f"accepted_{depth}"] += int((made > depth).sum())

    def _finish(self, job: _Job, finish: str) -> None:
        arrays = zip((job.tokens, job.logprobs, job.versions), (np.int32, np.float32, np.int32))
        self._done[job.id] = Completion(*(np.asarray(a, dtype) for a, dtype in arrays), finish)


def _chunk(todo: int) -> int:
    """The size in which the next of `todo` tokens are read: at most twice as many as are left, if there is such a size."""
    return max((c for c in _CHUNKS if c <= 2 * todo), default=_CHUNKS[0])


def _idle(slots: int, drafts: int) -> Slots:
    ints = lambda *shape: np.zeros((slots, *shape), np.int32)  # noqa: E731
    draw = Draw(np.zeros(slots, np.float32), np.ones(slots, np.float32), ints(), np.zeros(slots, np.uint32))
    return Slots(ints(), ints(), ints(), ints(drafts) - 1, ints(_MOST_STOPS) - 1, draw)


# Programs

_unstack = jit(unstack, static_argnums=1)


@functools.partial(jit, donate_argnums=0)
def _copy(keys: Keys, source, target) -> Keys:
    """All keys of slot `source` in slot `target` too."""

    def copy(x, axis):
        row = jax.lax.dynamic_slice_in_dim(x, source, 1, axis)
        return jax.lax.dynamic_update_slice_in_dim(x, row, target, axis)

    return Keys(*(jax.tree.map(functools.partial(copy, axis=axis), x) for x, axis in zip(keys, (1, 0))))


@functools.partial(jit, static_argnums=0, donate_argnums=2)
def _prefill(graphdef: nnx.GraphDef, params, keys: Keys, slot, start, count, tokens, following) -> Keys:
    """Reads `count` of tokens [1,c] into a slot that holds `start` tokens; `following` [1,c] are the tokens behind them."""
    model = merge(graphdef, params)
    pick = lambda axis: lambda x: jax.lax.dynamic_slice_in_dim(x, slot, 1, axis)  # noqa: E731
    put = lambda axis: lambda x, row: jax.lax.dynamic_update_slice_in_dim(x, row, slot, axis)  # noqa: E731
    row, length = jax.tree.map(pick(1), keys.trunk), jnp.full(1, start, jnp.int32)
    real = (jnp.arange(tokens.shape[1]) < count)[None].astype(jnp.int32)
    hidden, row = _trunk(model, row, tokens, length, real)
    trunk, mtp = jax.tree.map(put(1), keys.trunk, row), keys.mtp
    if mtp is not None:
        own, slots = jax.tree.map(pick(0), mtp), length[:, None] + jnp.arange(tokens.shape[1])
        _, _, own = model.mtp.extend(hidden, model.embed(following), slots, jnp.ones(1, bool), Memory(own, length))
        mtp = jax.tree.map(put(0), mtp, own)
    return Keys(trunk, mtp)


def _trunk(model: Glm5, keys: tuple, tokens, length, segment) -> tuple[jax.Array, tuple]:
    """(hidden states [B,T,D] of tokens [B,T] behind `length` [B] others, keys). segment: int32 [B,T], 0 = does not count."""
    slots = keys[0].latent.shape[2]
    cache = Cache(keys, (jnp.arange(slots) < length[:, None]).astype(jnp.int32), length)
    positions = length[:, None] + jnp.arange(tokens.shape[1])
    hidden, _, cache = model.trunk(tokens, positions, segment, cache)
    return hidden, cache.keys


@functools.partial(jit, static_argnums=(0, 5), donate_argnums=2)
def _decode(graphdef: nnx.GraphDef, params, keys: Keys, slots: Slots, waiting, drafts: int):
    """Up to `_PASSES` passes, fewer if all slots are idle, or if one becomes idle while requests wait.

    Returns:
      (keys, slots, `Passes`).
    """
    model, b = merge(graphdef, params), slots.pending.shape[0]
    empty = jnp.zeros((_PASSES, b, drafts + 1), jnp.int32)
    passes = Passes(empty, empty.astype(jnp.float32), empty[..., 0], jnp.int32(0))
    running = jnp.sum(slots.left > 0)

    def goes_on(carry):
        _, slots, passes = carry
        live = jnp.sum(slots.left > 0)
        return (passes.number < _PASSES) & (live > 0) & ~(waiting & (live < running))

    def one_pass(carry):
        keys, slots, passes = carry
        keys, slots, tokens, logprobs, made = _pass(model, keys, slots, drafts)
        put = lambda all, one: all.at[passes.number].set(one)  # noqa: E731
        results = (put(all, one) for all, one in zip(passes, (tokens, logprobs, made)))
        return keys, slots, Passes(*results, passes.number + 1)

    return jax.lax.while_loop(goes_on, one_pass, (keys, slots, passes))


def _pass(model: Glm5, keys: Keys, slots: Slots, drafts: int):
    """One pass of the network over the pending tokens and the guesses behind them.

    Returns:
      (keys, slots, tokens int32 [B,n+1], their log-probabilities, how many of them count [B]).
    """
    live, ahead = slots.left > 0, jnp.arange(drafts + 1)
    tokens = jnp.concatenate([slots.pending[:, None], jnp.maximum(slots.drafts, 0)], axis=1)
    segment = jnp.broadcast_to(live[:, None], tokens.shape).astype(jnp.int32)
    hidden, trunk = _trunk(model, keys.trunk, tokens, slots.length, segment)
    log_p = log_probs(model.logits(hidden), slots.draw)
    drawn = choose(log_p, slots.draw, slots.length[:, None] + 1 + ahead)
    right = jnp.cumprod(slots.drafts == drawn[:, :-1], axis=1)
    ends = jnp.any(drawn[..., None] == slots.stops[:, None], axis=-1)
    ended = jnp.cumsum(ends, axis=1) - ends > 0
    counts = (ahead <= jnp.sum(right, axis=1, keepdims=True)) & ~ended & (ahead < slots.left[:, None])
    made = jnp.sum(counts, axis=1)
    last = jnp.maximum(made - 1, 0)[:, None]
    left = jnp.where(jnp.any(counts & ends, axis=1), 0, slots.left - made)
    pending = jnp.where(live, jnp.take_along_axis(drawn, last, axis=1)[:, 0], slots.pending)
    after = slots._replace(pending=pending, length=slots.length + made, left=left)
    mtp = keys.mtp
    if drafts:
        mtp, guesses = _guess(model, mtp, hidden, drawn, slots.length, last, after, drafts)
        after = after._replace(drafts=guesses)
    logprobs = jnp.take_along_axis(log_p, drawn[..., None], axis=-1)[..., 0].astype(jnp.float32)
    return Keys(trunk, mtp), after, drawn, logprobs, made


def _guess(model: Glm5, keys, hidden, drawn, length, last, after: Slots, drafts: int):
    """The MTP layer's guesses of the tokens after the pending ones.

    Its first step reads all rows that the network has just passed, which leaves their keys behind, and goes on from the last
    one that counts. Later steps stand at the slots behind it, as in training; under IndexShare they see what the first step
    selected, and where training shares its keys (`mtp_share_kv`) they see these alone and leave none.

    Args:
      keys: of the MTP layer. hidden: of the trunk [B,n+1,D]. drawn: int32 [B,n+1], tokens behind these rows.
      length: int32 [B], tokens before them. last: int32 [B,1], the last row that counts. after: slots after this pass.
    Returns:
      (keys, guesses int32 [B,n]).
    """
    mtp, cfg, live = model.mtp, model.cfg, after.left > 0
    of_last = lambda x: jnp.take_along_axis(x, last.reshape(-1, *[1] * (x.ndim - 1)), axis=1)  # noqa: E731
    at = length[:, None] + jnp.arange(drafts + 1)
    hidden, chosen, keys = mtp.extend(hidden, model.embed(drawn), at, live, Memory(keys, length))
    hidden, at = of_last(hidden), of_last(at)
    shared = jax.tree.map(of_last, chosen) if cfg.index_share_for_mtp_iteration else NOTHING
    guesses = []
    for depth in range(drafts):
        if depth:
            embedded = model.embed(guesses[-1])
            if cfg.mtp_share_kv:
                memory = Memory(keys, None)
            else:
                at = at + 1
                memory = Memory(keys, at[:, 0])
            reuse = cfg.index_share_for_mtp_iteration
            hidden, _, keys = mtp.extend(hidden, embedded, at, live, memory, shared, reuse)
        log_p = log_probs(model.logits(hidden), after.draw)
        guesses.append(choose(log_p, after.draw, after.length[:, None] + 1 + depth))
    return keys, jnp.concatenate(guesses, axis=1)
