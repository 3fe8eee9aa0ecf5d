"""What the ``results.json`` of a comparison holds: for those who write it and those who read it.

One object: ``format``, ``recipe``, ``versions``, ``machine``, ``seeds``, ``created``, ``wall_seconds``, ``schemes`` in
display order, and the row lists of :data:`SECTIONS`, each row naming its ``scheme`` and ``seed``. Schemes that stand on
axes (``axes``) are compared along them. A list may be empty or missing: what would be made of it is then left out.
Numbers that do not exist are null.
"""

FORMAT = 1
"""Written, and the only one that is read."""

INSPECTION_FORMAT = 1
"""Of what ``attention-priors inspect`` writes; likewise."""

PLAN_SECTIONS = ("retrieval", "losses", "completions", "timing")
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
    "logit_scales",
    "extensions",
    *PLAN_SECTIONS,
)
"""The row lists."""
