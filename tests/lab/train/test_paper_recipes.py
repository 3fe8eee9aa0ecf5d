"""The papers' recipes build the papers' models: parameters are counted without allocating them."""

from pathlib import Path

import pytest
import torch

from attention_priors import Prior
from attention_priors.lab.data import nucleotide_tokenizer
from attention_priors.lab.train import TrainRecipe, load_train_recipe
from attention_priors.models import PriorDecoderForCausalLM

RECIPES = Path(__file__).parents[3] / "recipes"


def _load(name: str) -> TrainRecipe:
    return load_train_recipe(RECIPES / f"{name}.yaml")


def _model(recipe: TrainRecipe) -> PriorDecoderForCausalLM:
    assert recipe.model.decoder is not None
    with torch.device("meta"):
        return PriorDecoderForCausalLM(recipe.model.decoder.config(vocab_size=1))


def _prior_numbers(model: PriorDecoderForCausalLM) -> int:
    priors = [module for module in model.modules() if isinstance(module, Prior)]
    return sum(parameter.numel() for prior in priors for parameter in prior.parameters(recurse=False))


# BAM, Table 1: millions of parameters in the embedding and in the rest, the prior's numbers, sizes, learning rate.
@pytest.mark.parametrize(
    ("name", "embedding", "rest", "prior", "sizes", "rate"),
    [
        ("bam-120m", 25.2, 96.0, 576, (16, 12, 768, 1536), 1e-3),
        ("bam-432m", 50.3, 380.7, 1008, (24, 14, 1536, 3072), 5e-4),
        ("bam-1.1b", 67.1, 1073.8, 1440, (32, 15, 2048, 8192), 3e-4),
    ],
)
def test_bam_models_have_the_papers_sizes(name, embedding, rest, prior, sizes, rate):
    recipe = _load(name)
    model, config = _model(recipe), _model(recipe).config
    found = model.model.embed_tokens.weight.numel()
    assert round(found / 1e6, 1) == embedding
    assert round((model.num_parameters() - found) / 1e6, 1) == rest
    assert _prior_numbers(model) == prior
    assert (
        config.num_attention_heads,
        config.num_hidden_layers,
        config.hidden_size,
        config.intermediate_size,
    ) == sizes
    # θμ is there and does not train.
    trained = sum(p.numel() for n, p in model.named_parameters() if ".prior." in n and p.requires_grad)
    assert trained == prior * 2 // 3

    training = recipe.training
    assert training.learning_rate == rate
    assert (training.total_steps, training.step_tokens, training.context_length) == (19251, 589_824, 512)
    assert (training.optimizer, training.weight_decay, training.betas) == ("radam", 0.1, (0.9, 0.95))
    assert (training.gradient_clip, training.warmup_steps, training.minimum_learning_rate_ratio) == (1.0, 0, 0.1)


def test_goats_model_has_the_papers_size():
    recipe = _load("goat-125m")
    model, config = _model(recipe), _model(recipe).config
    assert int(model.num_parameters() / 1e5) == 1235
    assert (config.num_hidden_layers, config.num_attention_heads, config.hidden_size) == (12, 12, 768)
    # Two matrices of 768 × 3072 each layer there, three of 768 × 2048 here.
    assert 3 * config.intermediate_size == 2 * 3072
    assert config.tie_word_embeddings
    training = recipe.training
    assert training.total_steps == 4_000_000_000 // (32 * 2048) == 61035
    assert training.learning_rate * training.minimum_learning_rate_ratio == pytest.approx(3e-5)
    assert (training.optimizer, training.betas, training.epsilon) == ("adamw", (0.9, 0.95), 1e-8)
    assert (training.warmup_steps, training.weight_decay, training.gradient_clip) == (2000, 0.1, 1.0)
    assert (training.context_length, training.precision) == (2048, "bfloat16")


def test_goats_genome_model_is_its_text_model_on_bases():
    text, bases = _load("goat-125m"), _load("goat-dna-125m")
    assert text.model.decoder is not None
    assert bases.model.decoder is not None
    assert bases.model.decoder.vocab_size == len(nucleotide_tokenizer())
    assert bases.model.decoder.model_dump(exclude={"vocab_size"}) == text.model.decoder.model_dump(
        exclude={"vocab_size"}
    )
    assert bases.training == text.training
    assert bases.data.fasta is not None
    assert bases.data.fasta.held_out == ("chr21*",)


@pytest.mark.parametrize("name", ["bam-120m", "bam-432m", "bam-1.1b", "goat-125m"])
@pytest.mark.parametrize("processes", [1, 2, 4, 6])
def test_steps_can_be_shared_out(name, processes):
    recipe = _load(name)
    if name == "goat-125m" and processes == 6:
        with pytest.raises(ValueError, match=r"32 rows a step .* on 6 processes"):
            recipe.running.accumulation(recipe.training, processes)
        return
    rows, passes = recipe.running.accumulation(recipe.training, processes)
    assert rows * passes * processes == recipe.training.rows_per_step
