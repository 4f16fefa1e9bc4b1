"""`python -m glm5_jax` is `glm5`."""

from glm5_jax.cli import main

main()
