"""Recipes of ``attention-priors train``, checked before any work is done."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from attention_priors.encodings import LearnedTable
from attention_priors.lab.data import load_corpus
from attention_priors.lab.data.preparation import Preparation
from attention_priors.lab.data.settings import DataSettings, TokenizerSpec
from attention_priors.lab.data.sources import CorpusDocuments, Documents, FastaDocuments, HubDocuments
from attention_priors.lab.strict_yaml import Strict, read_strictly
from attention_priors.lab.train.fingerprints import CONFIG, MODEL, files_fingerprint, tokens_fingerprint
from attention_priors.lab.train.model import ModelSettings
from attention_priors.lab.train.settings import RunningSettings, TrainingSettings


class ValidationSettings(Strict):
    """What is measured on held-out text while a model trains."""

    every: int = Field(default=500, gt=0)
    """Steps from one measurement to the next; the last step always has one."""
    tokens: int = Field(default=1_000_000, gt=0)
    """At most so many of the held-out tokens, from their beginning."""


class TrainRecipe(Strict):
    """One training of one model."""

    name: str = Field(min_length=1)
    description: str = ""
    model: ModelSettings
    tokenizer: TokenizerSpec = None
    """Entries of a byte-level BPE trained on the text, or a tokenizer's path or Hugging Face name; none with
    ``data.shards``, which have theirs."""
    data: DataSettings
    training: TrainingSettings
    validation: ValidationSettings | None = None
    running: RunningSettings = RunningSettings()
    seed: int = Field(default=0, ge=0, lt=2**32)
    """Of new weights, of the order of rows and of dropout."""

    @model_validator(mode="after")
    def _possible(self) -> TrainRecipe:
        if (self.tokenizer is None) != (self.data.shards is not None):
            raise ValueError(
                f"tokenizer must be given, except with data.shards, which have theirs; got {self.tokenizer!r}"
            )
        length, most = self.training.context_length, self.data.max_tokens
        if most is not None and most < length:
            raise ValueError(
                f"data.max_tokens must be at least training.context_length, {length}, for a single row; it is {most}"
            )
        if self.model.decoder is not None:
            encoding = self.model.decoder.config(vocab_size=1).make_encoding()
            if isinstance(encoding, LearnedTable) and encoding.max_length < length:
                raise ValueError(
                    f"model.decoder.encoding: the learned table has max_length={encoding.max_length} positions, but "
                    f"training.context_length is {length}"
                )
        return self

    def identity(self) -> dict[str, Any]:
        """What determines the result, but for the versions of the libraries and the tokens that a run prepares itself.

        Folders that the recipe names are told by what is in them: weights are read in full.

        Raises:
            ShardError: the preparation of ``data.shards`` has not finished.
        """
        kept = self.model_dump(mode="json", exclude={"name", "description", "running"})
        del kept["training"]["checkpoint_steps"]
        fingerprints: dict[str, str | None] = {}
        if self.data.shards is not None:
            fingerprints["data.shards"] = tokens_fingerprint(Path(self.data.shards))
        if self.model.pretrained is not None:
            fingerprints["model.pretrained"] = files_fingerprint(self.model.pretrained, MODEL)
        if self.model.config is not None:
            fingerprints["model.config"] = files_fingerprint(self.model.config, CONFIG)
        return kept | {"fingerprints": fingerprints}

    def preparation(self) -> Preparation:
        """What ``attention-priors prepare`` makes for this recipe.

        Raises:
            ValueError, FileNotFoundError: there is nothing to prepare, or the text cannot be read.
        """
        data = self.data
        if data.shards is not None:
            if not Path(data.shards).is_dir():
                raise FileNotFoundError(f"data.shards: there is no folder {data.shards!r}")
            raise ValueError(f"data.shards: {data.shards!r} is prepared already")
        documents: Documents
        limit = data.max_tokens
        if data.dataset is not None:
            documents = HubDocuments(data.dataset)
            # Datasets may be far larger than what is read of them.
            limit = limit or self.training.total_rows * self.training.context_length
        elif data.fasta is not None:
            documents = FastaDocuments(data.fasta)
        else:
            assert data.text is not None
            documents = CorpusDocuments(load_corpus(data.text))
        assert self.tokenizer is not None
        return Preparation(
            documents,
            tokenizer=self.tokenizer,
            held_out_tokens=data.held_out_tokens,
            max_tokens=limit,
            shard_tokens=data.shard_tokens,
        )


def load_train_recipe(path: Path) -> TrainRecipe:
    """Read and check a recipe.

    Raises:
        RecipeError: if the file is not YAML, or a key or value is impossible; it names the key, its value and
            what is allowed.
        FileNotFoundError: if there is no such file.
    """
    return read_strictly(path, TrainRecipe)
