"""An evaluation: every task at every length, one line of a file for each text, interruptible."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from itertools import product
from pathlib import Path
from typing import Any

import torch

from attention_priors.data import EMBEDDED, Document, PasskeyTask, TokenStream, depths, load_corpus, token_stream
from attention_priors.data.corpora import read_documents
from attention_priors.data.needles import NEEDLE_TASKS, Haystack, PunktSplitter, RegexSplitter, load_haystack
from attention_priors.evaluation.needles import NeedleRetrieval
from attention_priors.evaluation.perplexity import binned, token_losses
from attention_priors.evaluation.plan import EvaluationPlan
from attention_priors.evaluation.records import Record, Records
from attention_priors.evaluation.retrieval import (
    PasskeyRetrieval,
    RetrievalTask,
    ask,
    filler_description,
    question_seed,
)
from attention_priors.evaluation.subject import Subject
from attention_priors.evaluation.summary import Summary, summarize
from attention_priors.evaluation.timing import time_model
from attention_priors.files import writable_folder
from attention_priors.hub.loading import check_positions
from attention_priors.machine import PeakMemory, memory_bytes, processor, versions
from attention_priors.output_folder import sole_writer

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
        batch: texts of equal length that are read together.
        observer: told of every step.

    Returns:
        What the plan asks for, of this model: other results that the file holds are left out.

    Raises:
        ValueError: before any work, if a text cannot be made or read, ``output`` holds other things, or is being
            written by another call.
        OSError: before any work, if ``output`` cannot be written.
    """
    for name, value in (("chunk", chunk), ("batch", batch)):
        if value < 1:
            raise ValueError(f"{name} must be a positive integer, got {value}")
    with sole_writer(writable_folder(output)):
        session = _Session(subject, plan, Records(output / "results.jsonl"), output / "log.jsonl", chunk, batch)
        session.observer = observer or Observer()
        session.check()
        session.run()
        return summarize(session.records, session.runs)


@dataclass
class _Session:
    subject: Subject
    plan: EvaluationPlan
    records: Records
    log: Path
    chunk: int
    batch: int
    observer: Observer = field(default_factory=Observer)
    runs: list[str] = field(default_factory=list)
    """Those of this session."""
    _documents: Sequence[Document] = ()
    _haystack: Haystack | None = None
    _stream: TokenStream | None = None

    def check(self) -> None:
        """Raise a ValueError if something that the plan asks for is impossible."""
        check_positions(self.subject.model, max(self.plan.lengths))
        self._subject_identity = self.subject.identity()
        self.tasks = {name: self._retrieval(name) for name in self.plan.tasks if not name.startswith(_OTHERS)}
        for task, length in product(self.tasks.values(), self.plan.lengths):
            task.check(length)
        for name in ("perplexity", "perplexity_short"):
            if name in self.plan.tasks:
                for length in self.plan.lengths:
                    if not self._texts(name, length):
                        kind = "at least" if name == "perplexity" else "between 2 and"
                        raise ValueError(
                            f"lengths: no document of {self.plan.corpus!r} has {kind} {length} tokens, for the task "
                            f"{name!r}"
                        )

    def run(self) -> None:
        """Do everything that is not done."""
        for name in self.plan.tasks:
            if name in self.tasks:
                self._retrieve(self.tasks[name])
            elif name == "timing":
                self._time()
            else:
                self._read(name)

    # ---- text

    def _tokens(self) -> TokenStream:
        if self._stream is None:
            source = self.plan.corpus
            # Of the embedded corpus people train on one part; of their own texts we know nothing.
            self._documents = load_corpus(EMBEDDED).held_out if source == EMBEDDED else read_documents(Path(source))[1]
            self._stream = token_stream(self.subject.tokenizer, self._documents)
        return self._stream

    def _texts(self, name: str, length: int) -> list[tuple[str, torch.Tensor]]:
        """Names and tokens of the documents that a perplexity is measured on."""
        stream = self._tokens()
        _, sizes = stream.document_ids.unique_consecutive(return_counts=True)
        begin = self.subject.beginning()
        found = []
        for document, tokens in zip(self._documents, stream.tokens.split(sizes.tolist()), strict=True):
            whole = torch.cat([begin, tokens])
            if name == "perplexity" and len(whole) >= length:
                found.append((document.name, whole[:length]))
            elif name == "perplexity_short" and 2 <= len(whole) <= length:
                found.append((document.name, whole))
        return found[: self.plan.documents]

    def _retrieval(self, name: str) -> RetrievalTask:
        if name in NEEDLE_TASKS:
            if self._haystack is None:
                self._haystack = load_haystack(self.plan.corpus)
            splitter = PunktSplitter() if self.plan.sentences == "punkt" else RegexSplitter()
            return NeedleRetrieval(name, self.subject, self._haystack, splitter)
        stream = self._tokens() if name == "passkey_corpus" else None
        wording = "short" if name == "passkey_corpus" else "long"
        texts = PasskeyTask(self.subject.tokenizer, stream, digits=8 if name == "passkey_8" else 5, wording=wording)
        description = {"wording": wording} | filler_description(self.plan.corpus, stream)
        return PasskeyRetrieval(name, self.subject, texts, description)

    def _begin(self, description: dict[str, Any]) -> str:
        run = self.records.begin({"format": FORMAT} | self._subject_identity | description)
        self.runs.append(run)
        return run

    # ---- retrieval

    def _retrieve(self, task: RetrievalTask) -> None:
        plan = self.plan
        run = self._begin(task.description() | {"seed": plan.seed, "depths": plan.depths if task.has_depth else None})
        total = float(sum(_cost(length) for length in plan.lengths) * plan.depths * plan.trials)
        done = 0.0
        for place, length in enumerate(plan.lengths):
            reason = self._given_up(run, plan.lengths[:place])
            if reason is not None:
                if not self.records.of(run, stopped_before=length):
                    self.records.append({"run": run, "task": task.name, "stopped_before": length, "reason": reason})
                self.observer.on_message(f"{task.name}: {reason}; longer texts are left out")
                break
            with self._logged(task.name, run, length) as log:
                for block in self._blocks():
                    done_here = {(line["depth_index"], line["trial"]) for line in self.records.of(run, length=length)}
                    if not set(block) <= done_here:
                        log["texts"] += len(block)
                        self._ask(task, run, length, block, done_here, done, total)
                    done += len(block) * _cost(length)
                    self.observer.on_work(task.name, done, total)
        self.observer.on_work(task.name, total, total)

    def _blocks(self) -> Iterator[list[tuple[int, int]]]:
        """Depths and trials, in the groups that are read together: the same ones however often it was interrupted."""
        grid = list(product(range(self.plan.depths), range(self.plan.trials)))
        for start in range(0, len(grid), self.batch):
            yield grid[start : start + self.batch]

    def _ask(
        self,
        task: RetrievalTask,
        run: str,
        length: int,
        block: list[tuple[int, int]],
        present: set[tuple[int, int]],
        done: float,
        total: float,
    ) -> None:
        all_depths = depths(self.plan.depths)
        questions = [
            task.question(
                length,
                all_depths[index] if task.has_depth else None,
                question_seed(self.plan.seed, length, index, trial),
            )
            for index, trial in block
        ]

        def on_tokens(read: int) -> None:
            share = read * read / (length * length)
            self.observer.on_work(task.name, done + share * len(block) * _cost(length), total)

        # Prompts of different lengths would need padding.
        same = len({(len(q.prompt), None if q.answer is None else len(q.answer)) for q in questions}) == 1
        groups = [questions] if same else [[question] for question in questions]
        answers = [
            answer
            for group in groups
            for answer in ask(self.subject, task, group, chunk=self.chunk, on_tokens=on_tokens)
        ]
        for (index, trial), question, answer in zip(block, questions, answers, strict=True):
            if (index, trial) in present:
                continue
            record: Record = {
                "run": run,
                "task": task.name,
                "length": length,
                "depth": all_depths[index] if task.has_depth else question.depth,
                "depth_index": index,
                "trial": trial,
                "tokens": len(question.prompt),
                "score": answer.score,
                "expected": list(question.expected),
                "output": answer.output,
            }
            if answer.token_accuracy is not None:
                record["token_accuracy"] = answer.token_accuracy
            self.records.append(record)

    def _given_up(self, run: str, lengths: Sequence[int]) -> str | None:
        """Why longer texts need not be tried; None if they should be."""
        number = self.plan.stop_after_zeros
        if number is None or len(lengths) < number:
            return None
        last = lengths[-number:]
        if any(line["score"] > 0 for length in last for line in self.records.of(run, length=length)):
            return None
        return f"nothing right at {number} length{'s' * (number > 1)} running ({', '.join(map(str, last))} tokens)"

    # ---- perplexity

    def _read(self, name: str) -> None:
        description = {"task": name} | filler_description(self.plan.corpus, self._tokens())
        run = self._begin(description)
        texts = {length: self._texts(name, length) for length in self.plan.lengths}
        total = float(sum(_cost(len(text)) for of_length in texts.values() for _, text in of_length))
        done = 0.0
        for length, of_length in texts.items():
            with self._logged(name, run, length) as log:
                for document, text in of_length:
                    if not self.records.of(run, length=length, document=document):
                        losses = token_losses(self.subject.model, text, chunk=self.chunk)
                        bins = [list(entry) for entry in binned(losses)]
                        self.records.append(
                            {"run": run, "task": name, "length": length, "document": document, "losses": bins}
                        )
                        log["texts"] += 1
                    done += _cost(len(text))
                    self.observer.on_work(name, done, total)

    # ---- timing

    def _time(self) -> None:
        model = self.subject.model
        device = torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else processor()
        run = self._begin(
            {"task": "timing", "passes": self.plan.passes, "device": device, "threads": torch.get_num_threads()}
        )
        steps = list(product(self.plan.lengths, (False, True)))
        total = float(sum(_cost(length) for length, _ in steps))
        done = 0.0
        for length, learns in steps:
            kind = "forward+backward" if learns else "forward"
            if not self.records.of(run, length=length, **{"pass": kind}):
                found = time_model(model, length, passes=self.plan.passes, learns=learns, seed=self.plan.seed)
                self.records.append({"run": run, "task": "timing", "length": length, "pass": kind} | found)
            done += _cost(length)
            self.observer.on_work("timing", done, total)

    # ---- log

    def _logged(self, task: str, run: str, length: int) -> _LogEntry:
        return _LogEntry(self, task, run, length)


_OTHERS = ("perplexity", "timing")
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
        device = self.session.subject.model.device
        line = self.line | {
            "seconds": round(time.monotonic() - self.started, 3),
            "peak_bytes": self.memory.bytes,
            "chunk": self.session.chunk,
            "batch": self.session.batch,
            "interrupted": error[0] is not None,
            "model": self.session.subject.name,
            "ended": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "device": str(device),
            "processor": processor(),
            "memory_bytes": memory_bytes(),
            "threads": torch.get_num_threads(),
            "versions": versions(SOFTWARE),
        }
        with self.session.log.open("ab") as file:
            file.write((json.dumps(line) + "\n").encode())
            file.flush()
            os.fsync(file.fileno())


def _cost(length: int) -> float:
    """How long a text takes to read, in arbitrary units: attention grows with its square."""
    return length * (1 + length / 4096)
