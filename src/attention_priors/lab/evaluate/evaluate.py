"""Resumable evaluation of every task at every length, with one record per unit of work."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from attention_priors._io import append_json_line, writable_folder
from attention_priors.hf.attach import number_of_rotary_positions
from attention_priors.lab.data.genomes import is_nucleotide_tokenizer
from attention_priors.lab.evaluate.records import Record, Records
from attention_priors.lab.evaluate.summary import Summary, summarize
from attention_priors.lab.machine import PeakMemory, memory_bytes, now, processor, versions
from attention_priors.lab.output_folder import sole_writer
from attention_priors.lab.tasks import EvaluationPlan, Subject
from attention_priors.lab.tasks.catalogue import make_task
from attention_priors.lab.tasks.task import Setting, Task, Unit
from attention_priors.lab.tasks.timing import SOFTWARE

FORMAT = 2
"""Version of texts and records. Records of other versions are not reused."""


@dataclass(frozen=True)
class Observer:
    """Progress callbacks of an evaluation."""

    on_work: Callable[[str, float, float], None] = lambda what, done, total: None
    """Callback with the name of a task, its finished work and its total work, in arbitrary units."""
    on_message: Callable[[str], None] = lambda message: None
    """Callback with a message to the user."""


def evaluate(
    subject: Subject,
    plan: EvaluationPlan,
    output: Path,
    *,
    chunk: int = 1024,
    batch: int = 1,
    observer: Observer | None = None,
) -> Summary:
    """Carry out the measurements of a plan that ``output`` does not hold yet.

    An interrupted evaluation resumes when called again. Records are appended to ``results.jsonl``, one line for each
    text. The run ID of a record is a hash of model, tokenizer, precision, task and texts. Time, memory and machine are
    logged in ``log.jsonl``.

    Args:
        subject: Model and tokenizer.
        plan: Tasks, lengths, depths, trials.
        output: Folder of the records.
        chunk: Tokens per forward pass. It bounds the memory and changes results only by rounding.
        batch: Number of texts of equal length that form a batch.
        observer: Progress callbacks.

    Returns:
        Results of the plan for this model. Other records in the file are ignored.

    Raises:
        ValueError: Before any work, if a text cannot be made or read, ``output`` holds other files under these names,
            or another call is writing to it.
        OSError: Before any work, if ``output`` cannot be written.
    """
    for name, value in (("chunk", chunk), ("batch", batch)):
        if value < 1:
            raise ValueError(f"{name} must be a positive integer, got {value}")
    observer = observer or Observer()
    # Before any other call, because calling a tokenizer may change it.
    identity = subject.identity()
    tasks = _checked_tasks(Setting(subject, plan, chunk, batch, observer.on_message))
    longest = max(task.tokens_read(max(plan.lengths)) for task in tasks)
    if longest > (most := number_of_rotary_positions(subject.model) or longest):
        observer.on_message(
            f"Texts have up to {longest} tokens, but the config of {subject.name} states {most} positions: rotary "
            "positions beyond them were not trained"
        )
    with sole_writer(writable_folder(output)):
        session = _Session(subject.name, identity, plan, output, observer)
        for task in tasks:
            session.carry_out(task)
    of_bases = subject.text_tokenizer is not None and is_nucleotide_tokenizer(subject.text_tokenizer)
    return replace(summarize(session.gathered), texts=session.texts, of_bases=of_bases)


def check_plan(subject: Subject, plan: EvaluationPlan, *, chunk: int) -> None:
    """Check that :func:`evaluate` can carry out a plan.

    Args:
        subject: Model of the same architecture, with any weights, and the tokenizer.
        plan: Plan to check.
        chunk: Tokens per forward pass.

    Raises:
        ValueError: :func:`evaluate` would raise this error before any work.
    """
    _checked_tasks(Setting(subject, plan, chunk))


def _checked_tasks(setting: Setting) -> list[Task]:
    tasks = [make_task(name, setting) for name in setting.plan.tasks]
    for task in tasks:
        task.check()
    return tasks


class _Session:
    """State of one call of :func:`evaluate`.

    Attributes:
        gathered: Earlier and new records of the plan.
        texts: Hash of the texts of each task (:attr:`Summary.texts`).
    """

    def __init__(
        self, model: str, identity: dict[str, Any], plan: EvaluationPlan, output: Path, observer: Observer
    ) -> None:
        self.model, self.identity, self.plan = model, identity, plan
        self.output, self.observer = output, observer
        self.records = Records(output / "results.jsonl")
        self.gathered: list[Record] = []
        self.texts: dict[str, str] = {}

    def carry_out(self, task: Task) -> None:
        """Carry out the missing measurements of a task."""
        run = self._begin(task)
        groups = {length: [*task.groups(length)] for length in self.plan.lengths}
        total = sum(unit.cost for of_length in groups.values() for group in of_length for unit in group)
        done = 0.0
        right: list[tuple[int, bool]] = []
        for length, of_length in groups.items():
            fields = [*of_length[0][0].key]
            found = {tuple(line[field] for field in fields): line for line in self.records.of(run, length=length)}
            missing = any(unit.id not in found for group in of_length for unit in group)
            reason = self._given_up(right) if task.stops_after_zeros and missing else None
            if reason is not None:
                self._stop(task.name, run, length, reason)
                break
            with self._logged(task, run, length) as log:
                for group in of_length:
                    cost = sum(unit.cost for unit in group)
                    if any(unit.id not in found for unit in group):
                        with self._followed(task, group, done, total):
                            answers = task.ask(length, group)
                        for unit, answer in zip(group, answers, strict=True):
                            if unit.id not in found:
                                line = {"run": run, "model": self.model, "task": task.name, "length": length}
                                line |= unit.key | answer
                                found[unit.id] = self.records.append(line)
                        log["texts"] += len(group)
                    done += cost
                    self.observer.on_work(task.name, done, total)
            here = [found[unit.id] for group in of_length for unit in group]
            self.gathered += here
            right.append((length, any(line.get("score", 0) > 0 for line in here)))
        self.observer.on_work(task.name, total, total)

    def _followed(
        self, task: Task, units: Sequence[Unit], done: float, total: float
    ) -> AbstractContextManager[RemovableHandle | None]:
        """Report progress after each forward pass over the texts of a group."""
        if not task.reads_texts:
            return nullcontext()  # a hook would change the time of a pass
        cost, tokens, read = sum(unit.cost for unit in units), sum(unit.size for unit in units), 0

        def count(module: nn.Module, args: tuple[Tensor, ...], output: object) -> None:
            nonlocal read
            read += args[0].numel()
            share = min(1.0, read / tokens) ** 2  # the time for a text grows with the square of its length
            self.observer.on_work(task.name, done + share * cost, total)

        return task.subject.model.register_forward_hook(count)

    def _begin(self, task: Task) -> str:
        """Return the ID of the task's run."""
        whole = {"format": FORMAT} | self.identity | {"task": task.name} | task.identity()
        if task.reads_texts:
            # The hash leaves out the model's weights, but not its tokenizer, which also determines the texts.
            determined = json.dumps({key: value for key, value in whole.items() if key != "model"}, sort_keys=True)
            self.texts[task.name] = hashlib.sha256(determined.encode()).hexdigest()[:16]
        return self.records.begin(whole)

    def _given_up(self, right: Sequence[tuple[int, bool]]) -> str | None:
        """Return the reason to skip longer texts, None to continue; ``right`` has each length and any success there."""
        number = self.plan.stop_after_zeros
        if number is None or len(right) < number or any(some for _, some in right[-number:]):
            return None
        last = ", ".join(str(length) for length, _ in right[-number:])
        return f"nothing right at {number} length{'s' * (number > 1)} running ({last} tokens)"

    def _stop(self, task: str, run: str, length: int, reason: str) -> None:
        there = self.records.of(run, stopped_before=length, reason=reason)
        if not there:
            line = {"run": run, "model": self.model, "task": task, "stopped_before": length, "reason": reason}
            there = [self.records.append(line)]
        self.gathered.append(there[0])
        self.observer.on_message(f"{task}: {reason}; longer texts are skipped")

    @contextmanager
    def _logged(self, task: Task, run: str, length: int) -> Iterator[dict[str, Any]]:
        """Log the cost of the texts of one length as one line; no line is written without texts."""
        setting, model = task.setting, task.subject.model
        line: dict[str, Any] = {"run": run, "task": task.name, "length": length, "texts": 0}
        started, interrupted = time.monotonic(), True
        memory = PeakMemory(model.device)
        try:
            with memory:
                yield line
            interrupted = False
        finally:
            if line["texts"] and task.reads_texts:
                line |= {
                    "seconds": round(time.monotonic() - started, 3),
                    "peak_bytes": memory.bytes,
                    "chunk": setting.chunk,
                    "batch": setting.batch,
                    "interrupted": interrupted,
                    "model": task.subject.name,
                    "ended": now(),
                    "device": str(model.device),
                    "processor": processor(),
                    "memory_bytes": memory_bytes(),
                    "threads": torch.get_num_threads(),
                    "versions": versions(SOFTWARE),
                }
                append_json_line(self.output / "log.jsonl", line)
