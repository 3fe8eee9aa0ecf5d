"""Command line: ``python -m attention_priors``.

``torchrun -m attention_priors train RECIPE.yaml`` starts several processes.
"""

from attention_priors.lab.cli import main

main()
