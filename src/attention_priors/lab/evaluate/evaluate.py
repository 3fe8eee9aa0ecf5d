"""An evaluation: every task at every length, one line of a file for each text, interruptible."""

from __future__ import annotations

import hashlib
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

from attention_priors._io import append_json_line, writable_folder
from attention_priors.hf.loading import check_chunk, check_positions
from attention_priors.hf.observe import observed_attention
from attention_priors.lab.data import depths
from attention_priors.lab.data.nucleotides import NUCLEOTIDES, is_nucleotide_tokenizer
from attention_priors.lab.evaluate.completion import complete, completion_seed
from attention_priors.lab.evaluate.needle_weights import needle_weights
from attention_priors.lab.evaluate.perplexity import binned, token_losses
from attention_priors.lab.evaluate.plan import COMPLETED, COMPLETION, PASSKEY_WEIGHT, PERPLEXITIES, EvaluationPlan
from attention_priors.lab.evaluate.records import Record, Records
from attention_priors.lab.evaluate.retrieval import Answer, Question, RetrievalTask, ask, question_seed
from attention_priors.lab.evaluate.subject import Subject
from attention_priors.lab.evaluate.summary import Summary, summarize
from attention_priors.lab.evaluate.texts import PlanTexts
from attention_priors.lab.evaluate.timing import time_model
from attention_priors.lab.machine import PeakMemory, memory_bytes, processor, versions
from attention_priors.lab.output_folder import sole_writer
from attention_priors.lab.wall_clock import now

FORMAT = 1
"""Of the texts and the records: results of different ones do not stand in for each other."""
SOFTWARE = ("attention-priors", "torch", "transformers")


@dataclass(frozen=True)
class Observer:
    """Whom an evaluation tells how far it is."""

    on_work: Callable[[str, float, float], None] = lambda what, done, total: None
    """Called with what is measured, how much of it is done, and how much of it there is, in arbitrary units."""
    on_message: Callable[[str], None] = lambda message: None


def evaluate(
    subject: Subject,
    plan: EvaluationPlan,
    output: Path,
    *,
    chunk: int = 1024,
    batch: int = 1,
    observer: Observer | None = None,
) -> Summary:
    """Measure what ``output`` does not hold yet.

    Interrupted at any point, the same call goes on from there. What is measured is appended to ``results.jsonl``, one
    line for each text, under a run's ID that stands for all that determines it: model, tokenizer, precision, task,
    texts. How long it took, on what and with what memory goes to ``log.jsonl``.

    Args:
        subject: the model and its tokenizer.
        plan: what to measure.
        output: a folder.
        chunk: tokens per forward pass; it bounds the memory and, but for rounding, changes nothing.
        batch: texts of equal length, with a question or to be continued, that are read together.
        observer: told of every step.

    Returns:
        What the plan asks for, of this model, whatever else the file holds.

    Raises:
        ValueError: before any work, if a text cannot be made or read, ``output`` holds other things, or is being
            written by another call.
        OSError: before any work, if ``output`` cannot be written.
    """
    for name, value in (("chunk", chunk), ("batch", batch)):
        if value < 1:
            raise ValueError(f"{name} must be a positive integer, got {value}")
    # First, as a tokenizer may change when it is called.
    identity = subject.identity()
    session = _Session(subject, identity, plan, output, chunk, batch, observer or Observer())
    session.check()
    with sole_writer(writable_folder(output)):
        session.run()
    of_bases = is_nucleotide_tokenizer(subject.tokenizer)
    return replace(summarize(session.gathered), texts=session.texts, of_bases=of_bases)


def check_plan(subject: Subject, plan: EvaluationPlan, *, chunk: int) -> None:
    """Raise the ValueError that :func:`evaluate` would raise about a plan before any work, if there is one.

    Args:
        subject: a model of the same kind, whatever its weights, and the tokenizer.
        plan: what is to be measured.
        chunk: tokens per forward pass.
    """
    _Session(subject, {}, plan, Path(), chunk, 1, Observer()).check()


@dataclass
class _Session:
    subject: Subject
    identity: dict[str, Any]
    plan: EvaluationPlan
    output: Path
    chunk: int
    batch: int
    observer: Observer
    gathered: list[Record] = field(default_factory=list)
    """The lines that the plan asks for, those that were there and those that are new."""
    texts: dict[str, str] = field(default_factory=dict)
    """As :attr:`Summary.texts`."""

    def __post_init__(self) -> None:
        self._sources = PlanTexts(self.subject, self.plan, self.observer.on_message)

    def check(self) -> None:
        """Raise a ValueError if something that the plan asks for is impossible; nothing is written."""
        self.tasks = {name: self._sources.retrieval(name) for name in self.plan.tasks if not name.startswith(_OTHERS)}
        for task, length in product(self.tasks.values(), self.plan.lengths):
            task.check(length)
        for name in self.plan.tasks:
            longest = max(self.plan.lengths)
            answers = name in self.tasks and name != PASSKEY_WEIGHT
            read = self.tasks[name].tokens_read(longest) if answers else longest
            read += COMPLETED - 1 if name == COMPLETION else 0
            try:
                check_positions(self.subject.model, read)
            except ValueError as error:
                raise ValueError(f"lengths: {longest} tokens for the task {name!r}: {error}") from error
            if name != "timing":  # it reads a text in one pass
                check_chunk(self.subject.model, read, self.chunk)
            if name == PASSKEY_WEIGHT:
                with observed_attention(self.subject.model, lambda layer: None):
                    pass  # it says if it cannot see it
            if name == COMPLETION:
                if not is_nucleotide_tokenizer(self.subject.tokenizer):
                    raise ValueError(f"tasks: {name!r} needs a model with the tokenizer {NUCLEOTIDES!r}")
                for length in self.plan.lengths:
                    if not self._sources.unfinished(length):
                        raise ValueError(
                            f"lengths: {self._sources.source} has no {length} tokens and {COMPLETED} known bases after "
                            f"them in one document, for the task {name!r}"
                        )
            if name in PERPLEXITIES:
                for length in self.plan.lengths:
                    if not self._sources.to_read(name, length):
                        kind = "between 2 and" if name == "perplexity_short" else "at least"
                        size = max(self.plan.lengths) if name == "perplexity" else length
                        raise ValueError(
                            f"lengths: no document of {self._sources.source} has {kind} {size} tokens, for the task "
                            f"{name!r}"
                        )

    def run(self) -> None:
        """Do everything that is not done."""
        self.records = Records(self.output / "results.jsonl")
        for name in self.plan.tasks:
            if name == PASSKEY_WEIGHT:
                self._weigh(self.tasks[name])
            elif name in self.tasks:
                self._retrieve(self.tasks[name])
            elif name == "timing":
                self._time()
            elif name == COMPLETION:
                self._complete()
            else:
                self._read(name)

    def _begin(self, description: dict[str, Any]) -> str:
        whole = {"format": FORMAT} | self.identity | description
        if description["task"] != "timing":
            # All but the model's weights: its tokenizer and its kind of tokens determine the texts too.
            determined = json.dumps({key: value for key, value in whole.items() if key != "model"}, sort_keys=True)
            self.texts[description["task"]] = hashlib.sha256(determined.encode()).hexdigest()[:16]
        return self.records.begin(whole)

    # ---- retrieval

    def _retrieve(self, task: RetrievalTask) -> None:
        plan = self.plan
        run = self._begin(task.description() | {"seed": plan.seed, "depths": plan.depths if task.has_depth else None})
        grid = self._grid()
        total = float(sum(_cost(length) for length in plan.lengths) * len(grid))
        done = 0.0
        right: list[tuple[int, bool]] = []
        for length in plan.lengths:
            found = {(line["depth_index"], line["trial"]): line for line in self.records.of(run, length=length)}
            if not found.keys() >= set(grid):
                reason = self._given_up(right)
                if reason is not None:
                    self._stop(task.name, run, length, reason)
                    break
            with self._logged(task.name, run, length) as log:
                # The same groups however often it was interrupted: rounding depends on what is read together.
                for start in range(0, len(grid), self.batch):
                    block = grid[start : start + self.batch]
                    if not found.keys() >= set(block):
                        for place, line in self._ask(task, run, length, block, done, total):
                            if place not in found:
                                found[place] = self.records.append(line)
                        log["texts"] += len(block)
                    done += len(block) * _cost(length)
                    self.observer.on_work(task.name, done, total)
            here = [found[place] for place in grid]
            self.gathered += here
            right.append((length, any(line["score"] > 0 for line in here)))
        self.observer.on_work(task.name, total, total)

    def _grid(self) -> list[tuple[int, int]]:
        """Index of the depth, and trial, of each text of a length."""
        # All depths once, then again: more trials join what is there, and groups stay as they were.
        return [(depth, trial) for trial, depth in product(range(self.plan.trials), range(self.plan.depths))]

    def _question(self, task: RetrievalTask, length: int, index: int, trial: int) -> Question:
        depth = depths(self.plan.depths)[index] if task.has_depth else None
        return task.question(length, depth, question_seed(self.plan.seed, length, index, trial))

    def _line(self, task: RetrievalTask, run: str, length: int, index: int, trial: int, question: Question) -> Record:
        """What a line says of its text."""
        return {
            "run": run,
            "task": task.name,
            "length": length,
            "depth": depths(self.plan.depths)[index] if task.has_depth else question.depth,
            "depth_index": index,
            "trial": trial,
            "tokens": len(question.prompt),
        }

    def _ask(
        self, task: RetrievalTask, run: str, length: int, block: list[tuple[int, int]], done: float, total: float
    ) -> list[tuple[tuple[int, int], Record]]:
        questions = [self._question(task, length, index, trial) for index, trial in block]
        # What differs in length would need padding.
        groups: dict[tuple[int, int], list[int]] = {}
        for place, question in enumerate(questions):
            size = len(question.prompt), 0 if question.answer is None else len(question.answer)
            groups.setdefault(size, []).append(place)
        answers: dict[int, Answer] = {}
        for places in groups.values():
            on_tokens = self._progress(task.name, length, done, total, count=len(places))
            group = [questions[place] for place in places]
            found = ask(self.subject, task, group, chunk=self.chunk, on_tokens=on_tokens)
            answers |= dict(zip(places, found, strict=True))
            done += len(places) * _cost(length)
        lines = []
        for place, (index, trial) in enumerate(block):
            question, answer = questions[place], answers[place]
            line = self._line(task, run, length, index, trial, question)
            line |= {"score": answer.score, "expected": list(question.expected), "output": answer.output}
            if answer.tokens_right is not None:
                line["token_accuracy"] = round(statistics.fmean(answer.tokens_right), 7)
                line["tokens_right"] = list(answer.tokens_right)
            lines.append(((index, trial), line))
        return lines

    def _given_up(self, right: Sequence[tuple[int, bool]]) -> str | None:
        """Why longer texts need not be tried, after these lengths and whether anything was right; None if they should.

        What is right may be right in part.
        """
        number = self.plan.stop_after_zeros
        if number is None or len(right) < number or any(some for _, some in right[-number:]):
            return None
        last = ", ".join(str(length) for length, _ in right[-number:])
        return f"nothing right at {number} length{'s' * (number > 1)} running ({last} tokens)"

    def _stop(self, task: str, run: str, length: int, reason: str) -> None:
        there = self.records.of(run, stopped_before=length, reason=reason)
        if not there:
            there = [self.records.append({"run": run, "task": task, "stopped_before": length, "reason": reason})]
        self.gathered.append(there[0])
        self.observer.on_message(f"{task}: {reason}; longer texts are left out")

    def _progress(self, what: str, length: int, done: float, total: float, count: int = 1) -> Callable[[int], None]:
        """What to call with the number of tokens read of ``count`` texts of this length."""

        def on_tokens(read: int) -> None:
            # A text's time is a little of its length and much of its square; an answer may be read beyond it.
            self.observer.on_work(what, done + count * _cost(length) * min(1.0, read / length) ** 2, total)

        return on_tokens

    # ---- attention

    def _weigh(self, task: RetrievalTask) -> None:
        plan, name = self.plan, task.name
        run = self._begin(task.description() | {"seed": plan.seed, "depths": plan.depths})
        grid = self._grid()
        total = float(sum(_cost(length) for length in plan.lengths) * len(grid))
        done = 0.0
        for length in plan.lengths:
            found = {(line["depth_index"], line["trial"]): line for line in self.records.of(run, length=length)}
            with self._logged(name, run, length) as log:
                for index, trial in grid:
                    if (index, trial) not in found:
                        question = self._question(task, length, index, trial)
                        assert question.needle is not None
                        weights = needle_weights(
                            self.subject.model,
                            question.prompt,
                            question.needle,
                            chunk=self.chunk,
                            on_tokens=self._progress(name, length, done, total),
                        )
                        line = self._line(task, run, length, index, trial, question)
                        line["weights"] = [[round(weight, 7) for weight in layer] for layer in weights]
                        found[index, trial] = self.records.append(line)
                        log["texts"] += 1
                    self.gathered.append(found[index, trial])
                    done += _cost(length)
                    self.observer.on_work(name, done, total)

    # ---- perplexity

    def _read(self, name: str) -> None:
        run = self._begin({"task": name} | self._sources.corpus.description())
        texts = {length: self._sources.to_read(name, length) for length in self.plan.lengths}
        total = float(sum(_cost(len(text)) for of_length in texts.values() for _, text in of_length))
        done = 0.0
        for length, of_length in texts.items():
            found = {line["document"]: line for line in self.records.of(run, length=length)}
            with self._logged(name, run, length) as log:
                for document, text in of_length:
                    if document not in found:
                        on_tokens = self._progress(name, len(text), done, total)
                        losses = token_losses(self.subject.model, text, chunk=self.chunk, on_tokens=on_tokens)
                        bins = [list(entry) for entry in binned(losses)]
                        line = {"run": run, "task": name, "length": length, "document": document, "losses": bins}
                        found[document] = self.records.append(line)
                        log["texts"] += 1
                    self.gathered.append(found[document])
                    done += _cost(len(text))
                    self.observer.on_work(name, done, total)

    # ---- genomes

    def _complete(self) -> None:
        subject, plan = self.subject, self.plan
        run = self._begin(
            {"task": COMPLETION, "seed": plan.seed, "bases": COMPLETED} | self._sources.corpus.description()
        )
        pieces = {length: self._sources.unfinished(length) for length in plan.lengths}
        total = float(sum(_cost(length) * len(of_length) for length, of_length in pieces.items()))
        done = 0.0
        for length, of_length in pieces.items():
            found = {(line["document"], line["trial"]): line for line in self.records.of(run, length=length)}
            with self._logged(COMPLETION, run, length) as log:
                for document, tokens in of_length:
                    # The same groups however often it was interrupted: rounding depends on what is read together.
                    for start in range(0, plan.trials, self.batch):
                        trials = range(start, min(start + self.batch, plan.trials))
                        missing = [trial for trial in trials if (document, trial) not in found]
                        if not missing:
                            continue
                        outputs = complete(
                            subject.model,
                            subject.tokenizer,
                            tokens[:length],
                            [completion_seed(plan.seed, length, document, trial) for trial in trials],
                            chunk=self.chunk,
                            on_tokens=self._progress(COMPLETION, length, done, total),
                        )
                        expected = str(subject.tokenizer.decode(tokens[length:]))
                        for trial, output in zip(trials, outputs, strict=True):
                            if trial not in missing:
                                continue
                            line = {"run": run, "task": COMPLETION, "length": length, "document": document}
                            line |= {"trial": trial, "expected": expected, "continuation": output}
                            found[document, trial] = self.records.append(line)
                        log["texts"] += len(missing)
                    self.gathered += [found[document, trial] for trial in range(plan.trials)]
                    done += _cost(length)
                    self.observer.on_work(COMPLETION, done, total)

    # ---- timing

    def _time(self) -> None:
        model = self.subject.model
        device = torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else processor()
        run = self._begin(
            {
                "task": "timing",
                "passes": self.plan.passes,
                "device": device,
                "threads": torch.get_num_threads(),
                "versions": versions(SOFTWARE),
            }
        )
        steps = list(product(self.plan.lengths, (False, True)))
        total = float(sum(_cost(length) for length, _ in steps) * self.plan.passes)
        done = 0.0
        for length, learns in steps:
            kind = "forward+backward" if learns else "forward"
            there = self.records.of(run, length=length, **{"pass": kind})
            if not there:

                def on_pass(count: int, done: float = done, length: int = length) -> None:
                    self.observer.on_work("timing", done + count * _cost(length), total)

                found = time_model(
                    model, length, passes=self.plan.passes, learns=learns, seed=self.plan.seed, on_pass=on_pass
                )
                there = [self.records.append({"run": run, "task": "timing", "length": length, "pass": kind} | found)]
            self.gathered.append(there[0])
            done += self.plan.passes * _cost(length)
            self.observer.on_work("timing", done, total)

    # ---- log

    def _logged(self, task: str, run: str, length: int) -> _LogEntry:
        return _LogEntry(self, task, run, length)


_OTHERS = ("perplexity", "timing", COMPLETION)
"""What tasks that are not about retrieval begin with."""


class _LogEntry:
    """One line of the log: what the texts of one length took. Without a text, none is written."""

    def __init__(self, session: _Session, task: str, run: str, length: int) -> None:
        self.session = session
        self.line: dict[str, Any] = {"run": run, "task": task, "length": length, "texts": 0}
        self.memory = PeakMemory(session.subject.model.device)

    def __enter__(self) -> dict[str, Any]:
        self.memory.__enter__()
        self.started = time.monotonic()
        return self.line

    def __exit__(self, *error: Any) -> None:
        self.memory.__exit__(*error)
        if not self.line["texts"]:
            return
        session = self.session
        line = self.line | {
            "seconds": round(time.monotonic() - self.started, 3),
            "peak_bytes": self.memory.bytes,
            "chunk": session.chunk,
            "batch": session.batch,
            "interrupted": error[0] is not None,
            "model": session.subject.name,
            "ended": now(),
            "device": str(session.subject.model.device),
            "processor": processor(),
            "memory_bytes": memory_bytes(),
            "threads": torch.get_num_threads(),
            "versions": versions(SOFTWARE),
        }
        append_json_line(session.output / "log.jsonl", line)


def _cost(length: int) -> float:
    """How long a text takes to read, in arbitrary units: attention grows with its square."""
    return length * (1 + length / 4096)
