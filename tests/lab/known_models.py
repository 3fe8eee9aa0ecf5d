"""Tiny decoders, and stand-ins for models with known answers."""

from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from attention_priors.lab.evaluate import Summary
from attention_priors.lab.report import evaluation_results, evaluation_tables
from attention_priors.models import PriorDecoderConfig, PriorDecoderForCausalLM

VOCABULARY = 30

SCHEMES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "laplace": {"prior": "laplace"},
    "generalized gaussian, ssmax": {
        "prior": {"name": "generalized_gaussian", "init": "sampled"},
        "logit_scale": {"name": "ssmax", "init": 0.4},
    },
    "key sink, shared": {
        "prior": [{"name": "key_sink", "train_length": 8, "init": "recency"}, {"name": "window", "size": 6}],
        "share_prior": True,
    },
    "rotary": {"encoding": "rotary"},
    "learned table": {"encoding": {"name": "learned", "max_length": 40}},
}


def tiny_decoder(seed: int = 0, **scheme: Any) -> PriorDecoderForCausalLM:
    torch.manual_seed(seed)
    config = PriorDecoderConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        initializer_range=0.5,
        **scheme,
    )
    return PriorDecoderForCausalLM(config).eval()


def random_text(seed: int, length: int) -> Tensor:
    return torch.randint(VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed))


class Predictor:
    """Stand-in for a decoder that reads one text at a time, chunk by chunk, and predicts by a rule."""

    device = torch.device("cpu")
    config = PriorDecoderConfig(vocab_size=400, hidden_size=4, num_attention_heads=2, num_hidden_layers=1)

    def __init__(self) -> None:
        self.cache: object = None
        self.read: list[int] = []

    def predict(self, text: list[int]) -> int:
        """Return the token after ``text``."""
        raise NotImplementedError

    def __call__(self, tokens: Tensor, *, cache: Any, use_cache: bool, logits_to_keep: int) -> SimpleNamespace:
        assert use_cache
        if cache is not self.cache:
            self.cache, self.read = cache, []
        start = len(self.read)
        self.read += tokens[0].tolist()
        ends = range(start + 1, len(self.read) + 1)[-logits_to_keep:]
        logits = torch.zeros(1, len(ends), self.config.vocab_size)
        for place, end in enumerate(ends):
            logits[0, place, self.predict(self.read[:end])] = 1.0
        return SimpleNamespace(logits=logits)

    def as_model(self) -> PreTrainedModel:
        return cast(PreTrainedModel, self)


class Reciter(Predictor):
    """Model that knows one text by heart, except the tokens at some places."""

    def __init__(self, text: Tensor, wrong: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.text, self.wrong = text.tolist(), wrong

    def predict(self, text: list[int]) -> int:
        place = len(text)
        return (self.text[place] + (place in self.wrong)) % self.config.vocab_size


class Copier(Predictor):
    """Model that repeats the token after the last occurrence of the last six tokens, within ``reach``."""

    def __init__(self, reach: int) -> None:
        super().__init__()
        self.reach = reach

    def predict(self, text: list[int]) -> int:
        last = text[-6:]
        for start in range(len(text) - 7, max(-1, len(text) - self.reach), -1):
            if text[start : start + 6] == last:
                return text[start + 6]
        return 0


def markdown(summary: Summary) -> str:
    """Return the tables of an evaluation."""
    return "\n".join(table.markdown() for table in evaluation_tables(evaluation_results(summary, "model")))
