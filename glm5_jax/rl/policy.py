"""The policy's loss in a training step: an objective on the log-probabilities of sampled tokens (paper Eq. 1).

A batch has, besides what training reads, float32 and bool arrays [..,T] that belong to the token at their place:
    loss_mask   the policy sampled it, and it is trained        rollout     its log-probability, recorded by the engine
    advantage   of the sample it belongs to                     weight      of `advantages.token_weights`
    teacher     optional, for distillation: its log-probability under the prompt's teacher, which decides the advantage (Eq. 2)
"""

from collections.abc import Callable

import jax

from glm5_jax.layers.mtp import shift
from glm5_jax.model import Glm5
from glm5_jax.rl.objectives import Tokens, distillation_advantage
from glm5_jax.sharding.context import own
from glm5_jax.train.loss import token_log_probs
from glm5_jax.train.step import target_weights

ARRAYS = ("rollout", "advantage", "weight")


def policy_loss(objective, temperature: float, chunk: int) -> Callable[[Glm5, jax.Array, dict], tuple[jax.Array, dict]]:
    """What `train.step.make_step` takes in place of the cross entropy of the next token.

    Args:
      objective: see `rl.objectives`. temperature: of the sampling. chunk: see `token_log_probs`.
    """

    def loss(model: Glm5, hidden: jax.Array, batch: dict) -> tuple[jax.Array, dict]:
        targets, mask = own(shift(batch["tokens"], 1)), own(target_weights(batch, 1)) > 0
        logp, entropy = token_log_probs(hidden, model.output_matrix(), targets, temperature, chunk)
        rollout, advantage, weight = (own(shift(batch[name], 1)) for name in ARRAYS)
        if "teacher" in batch:
            advantage = distillation_advantage(own(shift(batch["teacher"], 1)), logp, mask)
        return objective.loss(logp, Tokens(None, rollout, advantage, mask, weight), entropy)

    return loss
