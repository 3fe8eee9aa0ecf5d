"""Training recipes: consistent sizes, the papers' models, and a page that documents every key."""

from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from training_cases import tiny_settings

from attention_priors import Prior
from attention_priors.lab.data.genomes import nucleotide_tokenizer
from attention_priors.lab.train import TrainingSettings, load_train_recipe
from attention_priors.lab.train.engine import check_machinery
from attention_priors.lab.train.recipe import RunningSettings, TrainRecipe
from attention_priors.models import PriorDecoderForCausalLM

ROOT = Path(__file__).parents[3]


def test_steps_and_rows_follow_from_tokens():
    settings = tiny_settings(steps=None, tokens=1000, batch_size=None, tokens_per_step=36)
    assert (settings.rows_per_step, settings.step_tokens, settings.total_steps, settings.total_rows) == (3, 36, 27, 81)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"tokens": 100}, "set exactly one of steps and tokens; got steps and tokens"),
        ({"steps": None}, "set exactly one of steps and tokens; got none"),
        ({"tokens_per_step": 12}, "set exactly one of batch_size and tokens_per_step; got batch_size and"),
        ({"batch_size": None, "tokens_per_step": 50}, "tokens_per_step=50 must be a multiple of context_length=12"),
        ({"steps": None, "tokens": 23}, "tokens=23 must be at least one step, 24 tokens"),
        ({"warmup_steps": 6}, "warmup_steps=6 must be less than the 6 steps"),
    ],
)
def test_inconsistent_sizes_are_named(changes, complaint):
    with pytest.raises(ValidationError, match=complaint):
        tiny_settings(**changes)


@pytest.mark.parametrize(
    ("rows", "at_a_time", "processes", "expected"),
    [(8, None, 1, (8, 1)), (8, None, 4, (2, 1)), (8, 2, 1, (2, 4)), (8, 2, 2, (2, 2)), (8, 2, 4, (2, 1))],
)
def test_rows_of_a_step_are_distributed(rows, at_a_time, processes, expected):
    running = RunningSettings(rows_at_a_time=at_a_time)
    assert running.accumulation(tiny_settings(batch_size=rows), processes) == expected


@pytest.mark.parametrize(
    ("at_a_time", "processes", "complaint"),
    [
        (3, 1, r"8 rows a step \(96 tokens\) are not a multiple of rows_at_a_time=3 on 1 process$"),
        (4, 4, r"8 rows a step \(96 tokens\) are not a multiple of rows_at_a_time=4 on 4 processes"),
        (None, 3, "8 rows a step cannot be divided evenly among 3 processes"),
    ],
)
def test_indivisible_steps_are_refused(at_a_time, processes, complaint):
    with pytest.raises(ValueError, match=complaint):
        RunningSettings(rows_at_a_time=at_a_time).accumulation(tiny_settings(batch_size=8), processes)


def test_sharding_on_a_cpu_is_refused(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"running\.fsdp needs CUDA devices"):
        check_machinery(tiny_settings(), RunningSettings(fsdp={}))


def test_sharding_on_one_process_is_refused(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ValueError, match=r"running\.fsdp needs several processes"):
        check_machinery(tiny_settings(), RunningSettings(fsdp={}))


def test_float16_on_a_cpu_is_refused(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    settings: TrainingSettings = tiny_settings(precision="float16")
    with pytest.raises(ValueError, match=r"training\.precision float16 needs a CUDA device"):
        check_machinery(settings, RunningSettings())


def test_missing_loggers_are_named(monkeypatch):
    monkeypatch.setattr("attention_priors.lab.train.engine.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"running\.report_to: wandb is not installed"):
        check_machinery(tiny_settings(), RunningSettings(report_to=("wandb",)))


# ---- the papers' recipes: parameters are counted without allocating them


def _load(name: str) -> TrainRecipe:
    return load_train_recipe(ROOT / "recipes" / f"{name}.yaml")


def _model(recipe: TrainRecipe) -> PriorDecoderForCausalLM:
    assert recipe.model.decoder is not None
    with torch.device("meta"):
        return PriorDecoderForCausalLM(recipe.model.decoder.config(vocab_size=1))


def _prior_numbers(model: PriorDecoderForCausalLM) -> int:
    priors = [module for module in model.modules() if isinstance(module, Prior)]
    return sum(parameter.numel() for prior in priors for parameter in prior.parameters(recurse=False))


# BAM, Table 1: millions of parameters in the embedding and elsewhere, numbers of the prior, sizes, learning rate.
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
    # θμ exists and does not train.
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
    # The paper has two matrices of 768 × 3072 per layer. This model has three of 768 × 2048.
    assert 3 * config.intermediate_size == 2 * 3072
    assert config.tie_word_embeddings
    training = recipe.training
    assert training.total_steps == 4_000_000_000 // (32 * 2048) == 61035
    assert training.learning_rate * training.minimum_learning_rate_ratio == pytest.approx(3e-5)
    assert (training.optimizer, training.betas, training.epsilon) == ("adamw", (0.9, 0.95), 1e-8)
    assert (training.warmup_steps, training.weight_decay, training.gradient_clip) == (2000, 0.1, 1.0)
    assert (training.context_length, training.precision) == (2048, "bfloat16")


def test_goats_genome_model_matches_its_text_model():
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
def test_steps_of_committed_recipes_can_be_distributed(name, processes):
    recipe = _load(name)
    if name == "goat-125m" and processes == 6:
        with pytest.raises(ValueError, match=r"32 rows a step .* on 6 processes"):
            recipe.running.accumulation(recipe.training, processes)
        return
    rows, passes = recipe.running.accumulation(recipe.training, processes)
    assert rows * passes * processes == recipe.training.rows_per_step


def test_plugins_do_not_change_the_identity_of_a_run(make_recipe):
    assert make_recipe(plugins=["json"]).identity() == make_recipe().identity()
