"""Advantages of groups of samples and the weights of their tokens, in float64 on the host, once per optimizer step.

Paper section 3.2: A_i = (R_i - mean) / std over the group of one prompt; section 4.1.2 (agentic): without std. What the paper
leaves open is decided here: constant groups, groups of one, missing rewards, repeated samples, samples split from one rollout.
Float64 because float32 gives a group of equal rewards (0.9, 32 times) an advantage of 0.19.
"""

import math
import numbers
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np

from glm5_jax.config import check

_LARGEST = 1e100  # rewards and weights beyond it are mistakes, and their squares would overflow


class Advantages(NamedTuple):
    """One entry per sample; the three flags exclude each other, and where one is set the value is exactly 0."""

    values: np.ndarray  # float64 [n]
    zero_variance: np.ndarray  # bool [n]: all scored samples of the group, two or more, have the same reward
    singleton: np.ndarray  # bool [n]: the only scored sample of its group
    missing: np.ndarray  # bool [n]: left out, because it has no reward or the weight 0


def group_advantages(
    rewards: Sequence[float | None],
    group_ids: Sequence[Hashable],
    scale: str = "std",
    eps: float = 1e-6,
    weights: Sequence[float] | None = None,
) -> Advantages:
    """Rewards minus the mean of their group, divided by std + eps where `scale` is "std" (paper sections 3.2, 4.1.2).

    Groups are samples of equal id, wherever they stand and however many they are. The order of samples changes no bit.

    Args:
      rewards: one number per rollout (`check_rollouts` finds them). None: not scorable; the sample is in no statistics.
      group_ids: what the scheduler gave each prompt it sent out, never derived from the prompt's text.
      scale: "std", the unbiased one (n - 1), or "none".
      eps: of the unit of the rewards. Rewards (1, 1.00001) have std 7.1e-6 and with the default get -0.62 and 0.62.
      weights: how many times each sample counts, not necessarily whole; 0 leaves it out. 5 scorable samples of 8, repeated to
        fill their group (section 4.1.2), are 5 samples of weight 8 / 5.
    Raises:
      UserError: lengths differ, a reward is no finite number, a weight is negative, `scale` or `eps` are not allowed, or the
        weights of a group whose rewards differ add up to at most 1, so that it has no unbiased std.
    """
    check(scale in ("std", "none"), f"scale must be std or none, not {scale!r}")
    check(0 < eps < math.inf, f"eps must be positive, not {eps}")
    weights = _weights(weights, len(rewards), "weights")
    missing = np.array([reward is None for reward in rewards], bool) | (weights == 0)
    r = np.array([0.0 if reward is None else _number(reward, i) for i, reward in enumerate(rewards)], np.float64)
    values = np.zeros(len(r))
    zero_variance, singleton = np.zeros((2, len(r)), bool)
    for group, members in _members(group_ids, len(r), "group_ids").items():
        scored = members[~missing[members]]
        if len(scored) == 1:
            singleton[scored] = True
        elif len(scored) and r[scored].max() == r[scored].min():
            zero_variance[scored] = True
        elif len(scored):
            values[scored] = _advantages(r[scored], weights[scored], scale, eps, group)
    return Advantages(values, zero_variance, singleton, missing)


def keep_informative(rewards: Sequence[float | None], group_ids: Sequence[Hashable]) -> np.ndarray:
    """bool [n], for dynamic filtering: samples with a reward, in groups whose rewards are not all equal (max != min)."""
    _, zero_variance, singleton, missing = group_advantages(rewards, group_ids, scale="none")
    return ~(zero_variance | singleton | missing)


def check_rollouts(rollout_ids: Sequence[Hashable], rewards: Sequence[float | None]) -> tuple[np.ndarray, np.ndarray]:
    """Which samples are of the same rollout, after checking that they carry the same reward.

    A rollout becomes several samples where its context was compacted or its messages branch. It has one reward and counts
    once in its group: `group_advantages` of rewards[first], then `values[index]`.

    Returns:
      (first int64 [rollouts]: its first sample; index int64 [n]: the rollout of each sample), in the order of appearance.
    Raises:
      UserError: two samples of one rollout have different rewards, or only one of them has any.
    """
    rollouts = _members(rollout_ids, len(rewards), "rollout_ids")
    index = np.zeros(len(rewards), np.int64)
    for number, (rollout, members) in enumerate(rollouts.items()):
        index[members] = number
        reward = rewards[members[0]]
        for i in members[1:]:
            other = rewards[i]
            same = other is None if reward is None else other is not None and other == reward
            check(same, f"samples {members[0]} and {i} of rollout {rollout!r} have different rewards: {reward} and {other}")
    return np.array([members[0] for members in rollouts.values()], np.int64), index


def token_weights(
    masks: Sequence[np.ndarray], rollout_ids: Sequence[Hashable], sample_weights: Sequence[float] | None = None
) -> list[np.ndarray]:
    """Weight of every token in the loss: 1 / trainable tokens of its rollout / rollouts of the optimizer step.

    With these the loss is a plain sum (paper Eq. 1: mean over y, then over the group; groups are equally large), the same
    however its tokens are cut into micro-batches, rows and devices. They therefore come from all samples of the step at once.

    All samples of a rollout share its number of tokens, so that a rollout cut in three does not weigh three times as much. A
    rollout without trainable tokens is counted as a rollout, and adds 0; one with a constant group too. Rollouts without a
    reward are left out of the count by the weight 0, which is what `sample_weights=~advantages.missing` says.

    Args:
      masks: bool [T] per sample, true where the policy sampled the token and it is to be trained.
      rollout_ids: of each sample. sample_weights: how many times its rollout counts, as in `group_advantages`; 1 by default.
    Returns:
      float64 [T] per sample, 0 outside its mask. The sum over all is 1 if every rollout has trainable tokens.
    Raises:
      UserError: lengths differ, a mask is not bool [T], a weight is negative, samples of one rollout have different weights.
    """
    weights = _weights(sample_weights, len(masks), "sample_weights")
    for i, mask in enumerate(masks):
        right = isinstance(mask, np.ndarray) and mask.dtype == bool and mask.ndim == 1
        check(right, f"masks[{i}] must be a bool array [T], not {getattr(mask, 'dtype', type(mask).__name__)}{np.shape(mask)}")
    rollouts = _members(rollout_ids, len(masks), "rollout_ids")
    for rollout, members in rollouts.items():
        check(len(set(weights[members])) == 1, f"samples of rollout {rollout!r} have different weights")
    count = math.fsum(weights[members[0]] for members in rollouts.values())
    result = [np.zeros(len(mask)) for mask in masks]
    for members in rollouts.values():
        tokens = sum(int(masks[i].sum()) for i in members)
        for i in members:
            if weights[i] > 0:
                result[i][masks[i]] = weights[i] / count / max(tokens, 1)
    return result


def _advantages(r, weights, scale: str, eps: float, group: Hashable) -> np.ndarray:
    """float64 [n] of one group whose rewards `r` differ. Sums are correctly rounded, whatever the order of the samples."""
    total = math.fsum(weights)
    deviation = r - math.fsum(weights * r) / total
    if scale == "none":
        return deviation
    check(total > 1, f"weights of group {group!r} add up to {total:g}: a std needs more than 1")
    return deviation / (math.sqrt(math.fsum(weights * deviation**2) / (total - 1)) + eps)


def _members(ids: Sequence[Hashable], n: int, name: str) -> dict[Hashable, np.ndarray]:
    """Indices int64 of the samples of each id, ids in the order of appearance."""
    check(len(ids) == n, f"{name} has {len(ids)} entries for {n} samples")
    members: dict[Hashable, list[int]] = {}
    for i, key in enumerate(ids):
        members.setdefault(key, []).append(i)
    return {key: np.array(indices, np.int64) for key, indices in members.items()}


def _number(reward, i: int) -> float:
    """`reward` of sample i as a float; a dict, a string, NaN or infinity is an error that names the sample."""
    try:
        number = float(reward) if isinstance(reward, numbers.Real | np.bool_) else math.nan
    except OverflowError:  # an int beyond all floats
        number = math.inf
    check(abs(number) <= _LARGEST, f"reward of sample {i} must be a finite number or None, not {reward!r}")
    return number


def _weights(weights: Sequence[float] | None, n: int, name: str) -> np.ndarray:
    """float64 [n], ones by default."""
    weights = np.ones(n) if weights is None else np.asarray(weights, np.float64)
    check(weights.shape == (n,), f"{name} has shape {weights.shape} for {n} samples")
    wrong = np.flatnonzero(~((weights >= 0) & (weights <= _LARGEST)))
    check(not len(wrong), f"{name}[{wrong[0] if len(wrong) else 0}] must be a number from 0")
    return weights
