"""What a trained model of a comparison is asked: each measurement is a file in the model's folder, and taken once."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from attention_priors._io import append_json_line, read_json, with_nulls, write_json
from attention_priors.lab.data import ANSWER_LENGTH
from attention_priors.lab.evaluate import (
    EvaluationSettings,
    PasskeyRow,
    copying_rows,
    has_given_up,
    passkey_rows,
    perplexity_rows,
)
from attention_priors.lab.inspect import (
    logit_scale_rows,
    prior_mass_rows,
    prior_reach_rows,
    prior_rows,
    prior_term_rows,
    sink_mass_rows,
)
from attention_priors.lab.study.environment import environment
from attention_priors.lab.study.materials import Materials
from attention_priors.lab.study.plans import carry_out, unfinished
from attention_priors.lab.study.study import Progress
from attention_priors.lab.train import PositionSettings
from attention_priors.lab.wall_clock import WallClock
from attention_priors.models.decoder import PriorDecoderForCausalLM

KINDS = ("passkey", "perplexity", "copying", "plans")
"""Of measurements that take long enough for someone to want to know how far they are."""

FILES = (
    "passkey.jsonl", "perplexity.json", "copying.json", "sink_mass.json", "priors.json", "losses.json",
    "evaluate_seconds.json",
)  # fmt: skip
"""About a trained model, beside those of its plans."""


def measure(
    materials: Materials,
    scheme: str,
    positions: PositionSettings,
    trained_length: int,
    folder: Path,
    progress: Progress,
) -> None:
    """Measure what has not been measured yet of a trained model.

    Args:
        materials: the recipe's corpus and tokenizer.
        scheme: name of the scheme.
        positions: how they come into the model: the scheme's, or those of an extension.
        trained_length: tokens of a row of the last training.
        folder: the model's own, in which it is ``model``.
        progress: told of every step.

    Raises:
        FileNotFoundError: something is left to measure, and the model is not there any more.
    """
    evaluation = materials.recipe.evaluation_of(scheme)
    measured, asked = (folder / "done.json").exists(), not unfinished(evaluation, folder)
    if not (measured and asked):
        if not (folder / "model").exists():
            raise FileNotFoundError(
                f"{folder / 'model'} is gone, and has not been asked all that evaluation.plans ask; remove {folder} to "
                "train it again"
            )
        own: dict[str, Any] = {} if evaluation.tolerance is None else {"tolerance": evaluation.tolerance}
        model = on_device(PriorDecoderForCausalLM.from_pretrained(folder / "model", **own))
        if not measured:
            _write_priors(model, materials.recipe.longest_text, positions, trained_length, folder)
            with WallClock(folder / "evaluate_seconds.json") as clock:

                def tell(stage: str, done: int, total: int) -> None:
                    clock.tick()
                    progress(stage, done, total)

                stopped = _Measurements(model, materials, evaluation, folder, tell).take()
                done = {"evaluate_seconds": round(clock.seconds, 1), "stopped": stopped}
                write_json(folder / "done.json", done | environment())
                clock.forget()
        for stage in KINDS[:-1]:
            progress(stage, 1, 1)
        if not asked:
            carry_out(
                materials.subject(scheme, model),
                evaluation,
                folder,
                lambda done, total: progress("plans", round(100 * done), round(100 * total)),
            )
    for stage in KINDS:
        progress(stage, 1, 1)


def on_device(model: PriorDecoderForCausalLM) -> PriorDecoderForCausalLM:
    """The model for evaluation, on the accelerator where there is one."""
    model.eval()
    if torch.cuda.is_available():
        model.to(torch.device("cuda"))  # pyright: ignore[reportArgumentType]
    return model


def _write_priors(
    model: PriorDecoderForCausalLM, longest: int, positions: PositionSettings, trained_length: int, folder: Path
) -> None:
    """What the priors became, as they were trained, and what they are in texts of up to ``longest`` tokens."""
    length = max(trained_length, 3)
    layers: list[nn.Module] = [model.model] if positions.share_prior else list(model.model.layers)
    write_json(
        folder / "priors.json",
        {
            "priors": prior_rows(layers, length=longest),
            "logit_scales": logit_scale_rows(list(model.model.layers)),
            "prior_terms": prior_term_rows(layers, length=length),
            "prior_mass": prior_mass_rows(layers, length=length),
            "prior_reach": prior_reach_rows(layers, lengths=_doubled(length, longest)),
        },
    )


def _doubled(length: int, longest: int) -> list[int]:
    """A length, and twice it again and again, as long as texts are asked for."""
    lengths = [length]
    while 2 * lengths[-1] <= longest:
        lengths.append(2 * lengths[-1])
    return lengths


@dataclass(frozen=True)
class _Measurements:
    """All but the priors and the plans.

    Attributes:
        model: as it is to be asked.
        materials: the recipe's corpus and tokenizer.
        evaluation: what is measured.
        folder: the model's own.
        progress: told of every step.
    """

    model: PriorDecoderForCausalLM
    materials: Materials
    evaluation: EvaluationSettings
    folder: Path
    progress: Progress

    def take(self) -> str | None:
        """Take what is not there yet; return why it stopped early, if it did."""
        stopped = self._passkey()
        self._perplexity()
        self._copying()
        self._sink_mass()
        return stopped

    def _passkey(self) -> str | None:
        """Append a line per row to ``passkey.jsonl``; return why it stopped early, if it did."""
        settings = self.evaluation.passkey
        if settings is None:
            return None
        path = self.folder / "passkey.jsonl"
        rows = _read_rows(path)
        task = self.materials.passkey_task(settings)
        total = sum(_cost(length) for length in settings.lengths) * settings.depths
        spent = sum(_cost(row["length"]) for row in rows)
        self.progress("passkey", spent, total)
        # Every scheme and every seed reads the same texts, so that differences are the models'.
        remaining = passkey_rows(self.model, task, settings, chunk=self.evaluation.chunk, seed=0, done=len(rows))
        while len(rows) < settings.depths * len(settings.lengths):
            if len(rows) % settings.depths == 0 and (reason := has_given_up(rows, settings)):
                self.progress("passkey", total, total)
                return reason
            row = next(remaining)
            rows.append(row)
            append_json_line(path, row)
            spent += _cost(row["length"])
            self.progress("passkey", spent, total)
        return None

    def _perplexity(self) -> None:
        settings, path = self.evaluation.perplexity, self.folder / "perplexity.json"
        if settings is None or path.exists():
            return
        texts = self.materials.texts(settings.length, settings.documents)
        self.progress("perplexity", 0, len(texts))
        rows = perplexity_rows(
            self.model,
            texts,
            chunk=self.evaluation.chunk,
            on_text=lambda count: self.progress("perplexity", count, len(texts)),
        )
        write_json(path, with_nulls(rows))

    def _copying(self) -> None:
        """Write the losses of each length as soon as they are known."""
        settings = self.evaluation.copying
        if settings is None:
            return
        path = self.folder / "copying.json"
        rows: list[Any] = read_json(path) if path.exists() else []
        done = {row["length"] for row in rows}
        for count, length in enumerate(settings.lengths):
            self.progress("copying", count, len(settings.lengths))
            if length not in done:
                samples = self.materials.copying_samples(settings, length)
                rows += copying_rows(self.model, self.materials.copying_task(), samples, chunk=self.evaluation.chunk)
                write_json(path, with_nulls(rows))
        self.progress("copying", len(settings.lengths), len(settings.lengths))

    def _sink_mass(self) -> None:
        settings, path = self.evaluation.sink_mass, self.folder / "sink_mass.json"
        if settings is not None and not path.exists():
            texts = self.materials.texts(settings.length, settings.texts)
            write_json(path, with_nulls(sink_mass_rows(self.model, texts, factors=settings.factors)))


def _read_rows(path: Path) -> list[PasskeyRow]:
    """The rows of an evaluation that was interrupted; a last line that was cut off does not count."""
    if not path.exists():
        return []
    *lines, rest = path.read_text(encoding="utf-8").split("\n")
    if rest:
        path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return [json.loads(line) for line in lines]


def _cost(length: int) -> int:
    """How long a text takes to read, in arbitrary units: attention grows with its square."""
    return length * (4096 + length + ANSWER_LENGTH) // 4096
