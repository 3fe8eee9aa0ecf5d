"""Task classes by task name.

To add a task, write its file, add a line here, and describe the task in ``plan.py``.
"""

from __future__ import annotations

from attention_priors.lab.tasks.completion import GenomeCompletion
from attention_priors.lab.tasks.copying import Copying
from attention_priors.lab.tasks.passkey import PasskeyRetrieval, PasskeyWeight
from attention_priors.lab.tasks.perplexity import Perplexity
from attention_priors.lab.tasks.plan import COMPLETION, COPYING, PASSKEY_WEIGHT, PASSKEYS, PERPLEXITIES
from attention_priors.lab.tasks.ruler import RULER_TASKS
from attention_priors.lab.tasks.ruler.task import RulerRetrieval
from attention_priors.lab.tasks.task import Setting, Task
from attention_priors.lab.tasks.timing import Timing

_CLASSES: dict[str, type[Task]] = {
    **dict.fromkeys(PASSKEYS, PasskeyRetrieval),
    **dict.fromkeys(RULER_TASKS, RulerRetrieval),
    **dict.fromkeys(PERPLEXITIES, Perplexity),
    PASSKEY_WEIGHT: PasskeyWeight,
    COMPLETION: GenomeCompletion,
    COPYING: Copying,
    "timing": Timing,
}


def make_task(name: str, setting: Setting) -> Task:
    """Create a task by name.

    Raises:
        ValueError: the texts of the task cannot be made.
    """
    return _CLASSES[name](name, setting)
