"""Keys of recipes say what they mean: the site's tables are made of these descriptions."""

import pytest

from attention_priors.lab.bench.run import BenchRecipe
from attention_priors.lab.strict_yaml import Strict
from attention_priors.lab.study.images.recipe import ImageRecipe
from attention_priors.lab.study.recipe import Recipe
from attention_priors.lab.train.recipe import TrainRecipe


@pytest.mark.parametrize("model", [Recipe, ImageRecipe, TrainRecipe, BenchRecipe])
def test_every_key_has_a_description_or_is_a_section_with_one(model: type[Strict]) -> None:
    schema = model.model_json_schema()
    for name, section in {model.__name__: schema, **schema["$defs"]}.items():
        assert section["description"], name
        for key, value in section["properties"].items():
            assert value.get("description") or "$ref" in str(value), (name, key)
