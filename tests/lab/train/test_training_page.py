"""The page on training names every key of a recipe."""

from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel

from attention_priors.lab.train import TrainRecipe

PAGE = Path(__file__).parents[3] / "docs" / "training.md"


def _keys(model: type[BaseModel]) -> set[str]:
    found: set[str] = set()
    for name, field in model.model_fields.items():
        kinds: list[Any] = [field.annotation, *get_args(field.annotation)]
        sections = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
        found |= {key for section in sections for key in _keys(section)} if sections else {name}
    return found


def test_every_key_is_on_the_page():
    page = PAGE.read_text(encoding="utf-8")
    keys = _keys(TrainRecipe)
    assert {"learning_rate", "held_out_tokens", "rows_at_a_time", "head_dim", "revision"} <= keys
    missing = [key for key in sorted(keys) if f"`{key}`" not in page and f".{key}`" not in page]
    assert missing == [], missing
