"""What text a training reads, as recipes say it."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import BeforeValidator, Field, model_validator

from attention_priors.lab.data.tokenizer import tokenizer_spec
from attention_priors.lab.strict_yaml import Strict

TokenizerSpec: TypeAlias = Annotated[Annotated[int, Field(gt=256)] | str | None, BeforeValidator(tokenizer_spec)]
"""What a recipe says of a tokenizer: entries of one that is trained, which may stand in quotes, or a path or name."""


class HubDataset(Strict):
    """A dataset that Hugging Face's ``datasets`` can stream."""

    path: str = Field(min_length=1)
    """A name on the Hub (``HuggingFaceFW/fineweb``), or a format of local files: ``json``, ``parquet``, ``text``."""
    name: str | None = None
    """Which of its configurations (``sample-10BT``, ``en``, ``20231101.en``)."""
    split: str = "train"
    text: str = "text"
    """The field that holds the text."""
    data_files: str | tuple[str, ...] | None = None
    """Local files, or some of the repository's; may hold ``*``."""
    revision: str | None = None
    """A commit of the repository, so that the data stay what they were."""


class FastaSettings(Strict):
    """A genome (:class:`~attention_priors.lab.data.FastaFile`)."""

    path: str = Field(min_length=1)
    """Of the FASTA file, plain or compressed."""
    held_out: tuple[str, ...] | None = Field(default=None, min_length=1)
    """Names of the records that are not trained on, or patterns (``chr21*``); by default the first contigs that have
    ``held_out_tokens`` together are held out."""


class DataSettings(Strict):
    """Where the tokens come from: exactly one of ``text``, ``fasta``, ``dataset``, ``shards``."""

    text: str | None = None
    """``embedded`` (the Python standard library), a text file, a folder of text files, ``package:NAME``, or a small
    FASTA file."""
    fasta: FastaSettings | None = None
    """A genome of any size."""
    dataset: HubDataset | None = None
    shards: str | None = None
    """A folder that ``attention-priors prepare`` has made."""
    max_tokens: int | None = Field(default=None, gt=0)
    """Prepare no more than so many tokens to train on."""
    held_out_tokens: int = Field(default=1_000_000, gt=0)
    """Of a dataset, or of a genome without ``held_out``, the first documents that have so many tokens together are not
    trained on."""
    shard_tokens: int = Field(default=2**25, gt=0)
    """A file of prepared tokens ends with the document that brings it to so many."""
    order: Literal["shuffled", "as_read"] = "shuffled"
    """Whether rows are drawn from all over the tokens, each once an epoch, or read one after the other."""

    @model_validator(mode="after")
    def _one_source(self) -> DataSettings:
        given = [name for name in ("text", "fasta", "dataset", "shards") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"give one of text, fasta, dataset and shards, got {' and '.join(given) or 'none'}")
        return self

    @model_validator(mode="after")
    def _all_has_an_effect(self) -> DataSettings:
        if self.shards is not None:
            idle, why = ("max_tokens", "held_out_tokens", "shard_tokens"), "the tokens of shards are prepared already"
        elif self.text is not None:
            idle, why = ("held_out_tokens",), "a text has a held-out part of its own"
        elif self.fasta is not None and self.fasta.held_out is not None:
            idle, why = ("held_out_tokens",), "fasta.held_out names what is held out"
        else:
            return self
        given = [
            f"{name}={getattr(self, name)}"
            for name in idle
            if name in self.model_fields_set and getattr(self, name) is not None
        ]
        if given:
            raise ValueError(f"{why}: leave out what changes nothing, got {' and '.join(given)}")
        return self
