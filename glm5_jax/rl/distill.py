"""On-policy cross-stage distillation: the student answers, earlier checkpoints judge its tokens (paper section 3.5, Eq. 2).

It is the loop of RL with another advantage, log pi_teacher - log pi of every sampled token, made inside the step
(`rl.policy`); groups of one, large batches. Rewards are reported, the loss does not know them. docs/distillation.md says more.
"""

import pathlib

from glm5_jax.config import check
from glm5_jax.rl.config import RlConfig
from glm5_jax.rl.loop import Result, reinforce


def distill(config: RlConfig, run_dir: str | pathlib.Path, resume: bool = True) -> Result:
    """Runs until `config.steps`, or goes on where an earlier call stopped; see `reinforce`.

    Raises:
      UserError: no teachers, and all that `reinforce` and `teachers.Teachers` raise.
    """
    check(bool(config.teachers), "teachers: none named; TASK=RUN for each task, as in reverse:4=runs/reverse")
    return reinforce(config, run_dir, resume)
