"""RL objectives on the log-probabilities of sampled tokens: pure functions, gradient through `logp` only.

    loss, metrics = IcePop().loss(logp, Tokens(None, rollout, advantage, mask, weight))

Any object with such a `loss` is an objective. `IcePop` is reasoning RL and distillation (paper Eq. 1, 2), `DoubleSided` agentic
RL (Eq. 3-5), `Truncated` and `Grpo` are what these are compared with. The loss is a sum over tokens whose weights are made once
per optimizer step (`advantages.token_weights`): losses, gradients and metrics of micro-batches and devices add up to those of
the step. docs/rl_objectives.md defines every objective and every metric.

What stands outside of the mask is replaced by 0 before it is used, in every input: garbage there, NaN included, changes no bit.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from glm5_jax.config import check

KL_LOSSES = ("k2", "k3")
MAXIMA = ("max_abs_log_ratio",)  # metrics of which parts are combined by their maximum; all others are sums
_CLAMP = 20.0  # nats: log-ratios beyond it are cut before exp, which overflows float32 at 88.7; metrics are not cut


class Tokens(NamedTuple):
    """What a loss needs to know of tokens besides logp. All [...,T] as logp; floating point but for mask."""

    old: jax.Array | None  # log pi_old, the trainer's own at the start of the step; None: stop_gradient(logp), on-policy
    rollout: jax.Array  # log mu, recorded by the inference engine when it sampled the token
    advantage: jax.Array
    mask: jax.Array  # bool: the policy sampled this token, and it is trained
    weight: jax.Array  # of `advantages.token_weights`


class Kl(NamedTuple):
    """Estimators of KL(p || ref) from tokens sampled from p; all [...,T] in nats."""

    k1: jax.Array  # log p - log ref
    k2: jax.Array  # k1^2 / 2
    k3: jax.Array  # ref / p - 1 + k1, at least 0


@dataclasses.dataclass(frozen=True)
class IcePop:
    """GRPO with IcePop (paper Eq. 1): -w pop(rho) min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), rho = pi_old / mu.

    pop(rho) is rho itself in the closed interval [1 / beta, beta] and 0 outside; r = pi / pi_old.
    """

    beta: float = 2.0
    clip_low: float = 0.2
    clip_high: float = 0.28

    def __post_init__(self):
        check(1 <= self.beta < math.inf, f"beta must be at least 1, not {self.beta}")
        _check_clip(self.clip_low, self.clip_high)

    def loss(self, logp, tokens: Tokens, entropy=None) -> tuple[jax.Array, dict[str, jax.Array]]:
        """(loss, metrics) of logp [...,T], see `_loss`; `entropy` [...,T] of pi, in nats, is only reported."""
        logp, t = _masked(logp, tokens)
        log_rho, bound = t.old - t.rollout, math.log(self.beta)
        kept = t.mask & (log_rho >= -bound) & (log_rho <= bound)
        rho = jnp.exp(jnp.where(kept, log_rho, 0))
        surrogate, below, above = _clipped(logp, t, kept, self.clip_low, self.clip_high)
        return _loss(logp, t, kept, rho * surrogate, below, above, entropy)


@dataclasses.dataclass(frozen=True)
class DoubleSided:
    """Direct double-sided importance sampling (paper Eq. 3-5): -w f(q) A log pi, q = pi / mu; `Tokens.old` is not used.

    f(q) is q, a constant, in the open interval (1 - low, 1 + high) and 0 outside, whatever the sign of A. The paper gives no
    values for the interval.
    """

    low: float = 0.2
    high: float = 0.28

    def __post_init__(self):
        check(0 < self.low < 1, f"low must be between 0 and 1, not {self.low}")
        check(0 < self.high < math.inf, f"high must be positive, not {self.high}")

    def loss(self, logp, tokens: Tokens, entropy=None) -> tuple[jax.Array, dict[str, jax.Array]]:
        """(loss, metrics) of logp [...,T], see `_loss`; `entropy` [...,T] of pi, in nats, is only reported."""
        logp, t = _masked(logp, tokens)
        log_q = jax.lax.stop_gradient(logp) - t.rollout
        below, above = t.mask & (log_q <= math.log1p(-self.low)), t.mask & (log_q >= math.log1p(self.high))
        kept = t.mask & (log_q > math.log1p(-self.low)) & (log_q < math.log1p(self.high))
        q = jnp.exp(jnp.where(kept, log_q, 0))
        return _loss(logp, t, kept, q * t.advantage * logp, below, above, entropy)


@dataclasses.dataclass(frozen=True)
class Truncated:
    """GRPO with token-level truncated importance sampling: pop(rho) of `IcePop` is replaced by min(rho, cap)."""

    cap: float = 2.0
    clip_low: float = 0.2
    clip_high: float = 0.28

    def __post_init__(self):
        check(0 < self.cap < math.inf, f"cap must be positive, not {self.cap}")
        _check_clip(self.clip_low, self.clip_high)

    def loss(self, logp, tokens: Tokens, entropy=None) -> tuple[jax.Array, dict[str, jax.Array]]:
        """(loss, metrics) of logp [...,T], see `_loss`; `entropy` [...,T] of pi, in nats, is only reported."""
        logp, t = _masked(logp, tokens)
        rho = jnp.minimum(_exp(t.old - t.rollout), self.cap)
        surrogate, below, above = _clipped(logp, t, t.mask, self.clip_low, self.clip_high)
        return _loss(logp, t, t.mask, rho * surrogate, below, above, entropy)


@dataclasses.dataclass(frozen=True)
class Grpo:
    """GRPO with clip-higher and no correction of the engine's mismatch: -w min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)."""

    clip_low: float = 0.2
    clip_high: float = 0.28

    def __post_init__(self):
        _check_clip(self.clip_low, self.clip_high)

    def loss(self, logp, tokens: Tokens, entropy=None) -> tuple[jax.Array, dict[str, jax.Array]]:
        """(loss, metrics) of logp [...,T], see `_loss`; `entropy` [...,T] of pi, in nats, is only reported."""
        logp, t = _masked(logp, tokens)
        surrogate, below, above = _clipped(logp, t, t.mask, self.clip_low, self.clip_high)
        return _loss(logp, t, t.mask, surrogate, below, above, entropy)


def distillation_advantage(logp_teacher, logp_student, mask) -> jax.Array:
    """log pi_teacher - log pi of the sampled tokens, a constant, 0 outside `mask`; all [...,T] (paper Eq. 2).

    With it, the expected gradient of an on-policy loss is that of the sum over tokens of KL(pi || teacher) given the tokens
    before; how a token changes the KL of later ones is left out, as in the paper.
    """
    teacher, student = (_clean(x, mask) for x in (logp_teacher, logp_student))
    return jax.lax.stop_gradient(teacher - student)


def kl_terms(logp, logp_ref) -> Kl:
    """k1, k2, k3 of every token, not cut: k3 is infinite where ref / p overflows."""
    k1 = logp - logp_ref
    return Kl(k1, k1**2 / 2, jnp.expm1(-k1) + k1)


def kl_loss(logp, logp_ref, mask, weight, kind: str) -> jax.Array:
    """Sum of weight * KL(pi || ref) of tokens sampled from pi, as a term of a loss; no objective adds it by itself.

    The gradient of both kinds is weight * k1 * grad logp, in expectation that of KL(pi || ref) given the tokens before, and
    never cut. k1 and k3 differentiated as they stand have other expectations: 0, and the gradient of KL(ref || pi).

    Args:
      logp, logp_ref: [...,T], gradient through the first only. mask: bool [...,T]. weight: [...,T].
      kind: the value of every token. "k2", or "k3", to whose gradient the missing score term k3 * grad logp is added.
    Raises:
      UserError: any other kind.
    """
    check(kind in KL_LOSSES, f"KL as a loss must be k2 or k3 (with its score term), not {kind!r}")
    p, ref, weight = _clean(logp, mask), jax.lax.stop_gradient(_clean(logp_ref, mask)), _clean(weight, mask)
    terms = kl_terms(p, ref)
    value = terms.k2
    if kind == "k3":  # (1 - e^-k1) + k3 = k1, the gradient of k2
        k3 = jnp.expm1(jnp.clip(-terms.k1, -_CLAMP, _CLAMP)) + terms.k1
        value = terms.k2 + jax.lax.stop_gradient(k3 - terms.k2)
    return jnp.sum(jax.lax.stop_gradient(weight) * value)


def combine(a: Mapping, b: Mapping) -> dict:
    """Metrics of two parts of a step (micro-batches, devices) as those of both; `MAXIMA` by maximum, the others are sums."""
    return {name: jnp.maximum(a[name], b[name]) if name in MAXIMA else a[name] + b[name] for name in a}


def finish(metrics: Mapping) -> dict[str, float]:
    """Means and shares of the summed metrics of a whole step, on the host; 0 where there was no token to average over."""
    totals = {name: float(np.asarray(value)) for name, value in metrics.items()}
    whole = {"tokens", "positive", "negative", *MAXIMA}
    over = {"popped_positive": "positive", "popped_negative": "negative"}
    return {
        name: value if name in whole else value / max(totals[over.get(name, "tokens")], 1) for name, value in totals.items()
    }


def _loss(logp, t: Tokens, kept, gain, below, above, entropy):
    """(loss: -sum of weight * gain over `kept`, metrics as sums: int32 counts, the rest as logp); popped tokens keep their
    share of every denominator, which are in the weights."""
    loss = -jnp.sum(jnp.where(kept, t.weight * gain, 0))
    log_q = jax.lax.stop_gradient(logp) - t.rollout
    kl = kl_terms(-log_q, 0)  # of mu from pi: the tokens were sampled from mu
    popped, positive, negative = t.mask & ~kept, t.advantage > 0, t.advantage < 0
    counts = {
        "tokens": t.mask,
        "positive": positive,
        "negative": negative,
        "popped": popped,
        "popped_positive": popped & positive,
        "popped_negative": popped & negative,
        "clipped_low": below,
        "clipped_high": above,
    }
    sums = {"rollout_k1": kl.k1, "rollout_k2": kl.k2, "rollout_k3": kl.k3}
    metrics = {name: jnp.sum(x, dtype=jnp.int32) for name, x in counts.items()}
    metrics |= {name: jnp.sum(x) for name, x in sums.items()}
    metrics["rollout_ratio"] = jnp.sum(jnp.where(t.mask, jnp.exp(log_q), 0))
    metrics["max_abs_log_ratio"] = jnp.max(jnp.abs(log_q), initial=0)
    if entropy is not None:
        metrics["entropy"] = jnp.sum(jax.lax.stop_gradient(_clean(entropy, t.mask)))
    return loss, metrics


def _clipped(logp, t: Tokens, kept, low: float, high: float):
    """(min(r A, clip(r, 1 - low, 1 + high) A), clipped below, clipped above), [...,T]; the gradient is 0 where clipped.

    Tokens that are not `kept` have r = 1 here.
    """
    log_r = jnp.where(kept, logp - t.old, 0)
    below = (t.advantage < 0) & (log_r < math.log1p(-low))
    above = (t.advantage > 0) & (log_r > math.log1p(high))
    r = jnp.where(below, 1 - low, jnp.where(above, 1 + high, _exp(log_r)))
    return r * t.advantage, below, above


def _masked(logp, tokens: Tokens) -> tuple[jax.Array, Tokens]:
    """Both in one dtype, float32 or wider, with 0 outside the mask; all but logp are constants, `old` is filled in."""
    mask = jnp.asarray(tokens.mask)
    check(mask.dtype == bool, f"mask must be bool, not {mask.dtype}")
    for name, x in tokens._asdict().items():
        check(x is None or jnp.shape(x) == jnp.shape(logp), f"{name} has shape {jnp.shape(x)}, logp {jnp.shape(logp)}")
    logp = _clean(logp, mask)
    tokens = tokens._replace(old=logp if tokens.old is None else tokens.old, mask=None)
    constants = jax.tree.map(lambda x: jax.lax.stop_gradient(_clean(x, mask).astype(logp.dtype)), tokens)
    return logp, constants._replace(mask=mask)


def _clean(x, mask) -> jax.Array:
    """x in float32 or wider, 0 outside `mask`: no NaN of a masked token reaches a value or a gradient."""
    x = jnp.asarray(x)
    return jnp.where(mask, x.astype(jnp.promote_types(x.dtype, jnp.float32)), 0)


def _exp(log_ratio) -> jax.Array:
    """exp of a log-ratio cut to +-20, finite and with a gradient of 0 beyond."""
    return jnp.exp(jnp.clip(log_ratio, -_CLAMP, _CLAMP))


def _check_clip(low: float, high: float) -> None:
    check(0 <= low < 1, f"clip_low must be from 0 to below 1, not {low}")
    check(0 <= high < math.inf, f"clip_high must be a number from 0, not {high}")
