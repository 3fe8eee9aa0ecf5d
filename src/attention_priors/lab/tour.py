"""Tour of the package without training: examples answer pass keys far past their training length."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from attention_priors.lab.evaluate import Observer, Summary, evaluate
from attention_priors.lab.examples import EXAMPLES, TRAINED, example_folder
from attention_priors.lab.inspect import InspectionPlan, inspect_model, load_inspected, text_to_read
from attention_priors.lab.tasks import EvaluationPlan, Subject
from attention_priors.lab.tasks.passkey import ANSWER_LENGTH

LENGTHS = (TRAINED - ANSWER_LENGTH, 256, 512, 1024, 2048, 4096, 8192)
"""Lengths of the prompts in tokens. With its answer, the first is as long as a training row."""

PLAN = EvaluationPlan(tasks=("passkey_corpus",), lengths=LENGTHS, depths=10)
"""Pass keys in held-out source and prose of Python's standard library, one for each of ten depths."""

INSPECTED = "bam-ssmax"
"""Example that the tour looks into."""


def ask_examples(
    output: Path, *, device: str | None, on_work: Callable[[str, float, float], None]
) -> dict[str, Summary]:
    """Ask every example for pass keys at the lengths of :data:`PLAN`. Answers that ``output`` holds are reused.

    Args:
        output: Folder of the records, for all examples.
        device: Device of the models; by default CUDA if available.
        on_work: Callback with an example's scheme, its finished work and its total work.

    Returns:
        Results of each example, by scheme.
    """
    found = {}
    for name, scheme in EXAMPLES.items():
        subject = Subject.load(example_folder(name), device=device)

        def show(task: str, done: float, total: float, scheme: str = scheme) -> None:
            on_work(scheme, done, total)

        found[scheme] = evaluate(subject, PLAN, output, chunk=2048, batch=PLAN.depths, observer=Observer(show))
    return found


def inspect_example(*, device: str | None) -> dict[str, Any]:
    """Inspect one example on a file of Python's standard library, see :func:`inspect_model`."""
    name, text = text_to_read("embedded")
    plan = InspectionPlan(length=LENGTHS[-1], text=text, text_name=name)
    return inspect_model(load_inspected(example_folder(INSPECTED), device=device), plan)
