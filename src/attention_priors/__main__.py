"""``python -m attention_priors``, and ``torchrun -m attention_priors train RECIPE.yaml`` for several processes."""

from attention_priors.lab.cli import main

main()
