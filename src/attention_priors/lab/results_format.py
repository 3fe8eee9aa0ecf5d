"""What the ``results.json`` of a comparison holds: for those who write it and those who read it.

One object: ``format``, ``recipe``, ``versions``, ``machine``, ``seeds``, ``created``, ``wall_seconds``, ``schemes`` in
display order, and the row lists of :data:`SECTIONS`, each row naming its ``scheme`` and ``seed``. Schemes that stand on
axes (``axes``) are compared along them; ``context_length`` is what a scheme was last trained at, in tokens. A list may
be empty or missing: what would be made of it is then left out. Numbers that do not exist are null.
"""

FORMAT = 1
"""Written, and the only one that is read."""

INSPECTION_FORMAT = 1
"""Of what ``attention-priors inspect`` writes; likewise."""

IMAGE_SECTIONS = ("runs", "accuracy", "prior_maps")
"""The row lists of a comparison of classifiers of images, which has ``images`` in place of ``corpus``.

A row of ``accuracy`` has ``size`` (pixels), ``correct`` and ``trials``; one of ``prior_maps`` what a head's prior says
around the middle patch.
"""

PLAN_SECTIONS = ("retrieval", "losses", "completions", "needle_weights", "timing")
"""The row lists that evaluation plans fill."""

SECTIONS = (
    "runs",
    "passkey",
    "perplexity",
    "copying",
    "sink_mass",
    "priors",
    "prior_terms",
    "prior_mass",
    "prior_reach",
    "logit_scales",
    "extensions",
    *PLAN_SECTIONS,
)
"""The row lists."""
