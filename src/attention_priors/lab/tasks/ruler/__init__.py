"""Tasks of RULER, needles and variable tracking: prompts identical to the reference, and their score."""

from attention_priors.lab.tasks.ruler.needles import NEEDLE_TASKS
from attention_priors.lab.tasks.ruler.settings import RulerSettings
from attention_priors.lab.tasks.ruler.variables import VARIABLE_TASKS

RULER_TASKS: dict[str, RulerSettings] = {**NEEDLE_TASKS, **VARIABLE_TASKS}
"""Settings of the tasks by name."""
