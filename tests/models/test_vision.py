"""The vision transformer: results, images of all sizes, saving and loading, training, errors."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import interpolate
from transformers import AutoConfig, AutoModelForImageClassification

from attention_priors.lab.inspect import observed_attention
from attention_priors.models import PriorVisionConfig, PriorVisionForImageClassification
from attention_priors.priors import grid_positions
from thoroughness import every_other_deep

SMALL: dict[str, Any] = {
    "image_size": 16,
    "patch_size": 4,
    "num_channels": 2,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_labels": 5,
    "initializer_range": 0.2,
}
GGD = {"name": "generalized_gaussian", "init": "spread"}
KINDS: dict[str, dict[str, Any]] = {
    "axial": {"prior": {"name": "axial", "rows": GGD}},
    "goat": {"prior": ["spectral_2d", {"name": "key_sink_2d", "rows": 4, "columns": 4}], "logit_scale": "ssmax"},
    "radial, mean, shared": {"prior": {"name": "radial", "prior": "laplace"}, "pooling": "mean", "share_prior": True},
    "table": {"position_table": True},
    "table and prior": {"position_table": True, "prior": {"name": "axial", "rows": GGD}, "pooling": "mean"},
}


def made(**options: Any) -> PriorVisionForImageClassification:
    torch.manual_seed(0)
    return PriorVisionForImageClassification(PriorVisionConfig(**SMALL | options)).eval()


def images(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", every_other_deep(KINDS, ["table and prior"]))
def test_compiled_model_matches(name: str) -> None:
    """There is one graph. If tables are interpolated to each image's size, there are as many graphs as sizes."""
    layers = 2 if KINDS[name].get("share_prior") else 1
    model, pixels = made(**KINDS[name], num_hidden_layers=layers), images(2, 2, 12, 20)
    sizes = torch.tensor([[12, 20], [8, 12]])
    for given in ({}, {"image_sizes": sizes}):
        whole = not (given and model.config.position_table)
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="eager", fullgraph=whole)
        with torch.no_grad():
            torch.testing.assert_close(
                compiled(pixels, **given).logits, model(pixels, **given).logits, rtol=1e-4, atol=1e-5
            )


@pytest.mark.parametrize("name", KINDS)
def test_attention_matches_the_grid(name: str) -> None:
    model, pixels = made(**KINDS[name]), images(2, 2, 12, 20)
    outside = 0 if KINDS[name].get("pooling") == "mean" else 1
    positions = grid_positions(3, 5, outside=outside)
    seen: list[Any] = []
    with torch.no_grad(), observed_attention(model, seen.append):
        found = model(pixels, output_attentions=True)
    assert len(seen) == len(found.attentions) == 2
    for layer, weights in zip(seen, found.attentions, strict=True):
        problem = layer.problem
        assert torch.equal(problem.geometry.query_positions[0], positions)
        logits = problem.query @ problem.key.mT * problem.softmax_scale
        if problem.prior is not None:
            logits = logits + problem.prior.log_prior(positions, positions)
        if problem.row_scale is not None:
            logits = logits * problem.row_scale.unsqueeze(-1)
        torch.testing.assert_close(weights, logits.softmax(-1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", KINDS)
def test_saved_models_load_with_equal_logits(name: str, tmp_path: Path) -> None:
    model, pixels = made(**KINDS[name]), images(2, 2, 16, 16)
    model.save_pretrained(tmp_path)
    again = AutoModelForImageClassification.from_pretrained(tmp_path)
    assert type(again) is PriorVisionForImageClassification
    configs = (AutoConfig.from_pretrained(tmp_path).to_dict(), model.config.to_dict())
    assert configs[0] | {"_name_or_path": ""} == configs[1]
    torch.testing.assert_close(again(pixels).logits, model(pixels).logits, rtol=0, atol=0)
    learned = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert learned == {name for name, parameter in again.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize("name", KINDS)
def test_images_of_different_sizes_match_separate_passes(name: str) -> None:
    """Images of one size are neighbours in the batch, or not. One image has the training size, at which a table is
    unchanged.
    """
    model = made(**KINDS[name])
    sizes = [(16, 24), (12, 8), (16, 16), (12, 8), (8, 24)]
    alone = [images(1, 2, *size, seed=seed) for seed, size in enumerate(sizes)]
    together = images(5, 2, 16, 24, seed=9)  # padding may hold any numbers
    for place, image in zip(together, alone, strict=True):
        place[:, : image.shape[2], : image.shape[3]] = image[0]
    found = model(together, image_sizes=torch.tensor(sizes)).logits
    torch.testing.assert_close(found, torch.cat([model(image).logits for image in alone]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("pooling", ["class", "mean"])
def test_a_tables_gradient_sums_over_images(pooling: str) -> None:
    model = made(position_table=True, pooling=pooling).double()
    parameter: Any = model.model.embeddings.table
    sizes = [(16, 16), (12, 8), (12, 8)]
    alone = [images(1, 2, *size, seed=seed).double() for seed, size in enumerate(sizes)]
    together = torch.zeros(3, 2, 16, 16, dtype=torch.float64)
    for place, image in zip(together, alone, strict=True):
        place[:, : image.shape[2], : image.shape[3]] = image[0]
    batched = model(together, image_sizes=torch.tensor(sizes)).logits
    one_by_one = torch.cat([model(image).logits for image in alone])
    cotangent = images(3, 5, seed=7).double()
    found, expected = (
        torch.autograd.grad((logits * cotangent).sum(), parameter)[0] for logits in (batched, one_by_one)
    )
    # Interpolation is in float32.
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    assert float(expected.abs().max()) > 1e-2


def test_a_table_is_interpolated_at_other_sizes() -> None:
    model = made(position_table=True)
    table: Any = model.model.embeddings.table
    expected = interpolate(table[None], size=(6, 8), mode="bicubic")[0]
    torch.testing.assert_close(model.model.embeddings._table_of((6, 8)), expected)
    assert model.model.embeddings._table_of((4, 4)) is table
    # The interpolated table is added.
    pixels = images(1, 2, 24, 32)
    hidden, grid = model.model.embeddings(pixels)
    assert grid == (6, 8)
    patches = model.model.embeddings.projection(pixels) + expected
    torch.testing.assert_close(hidden[:, 1:], patches.flatten(2).mT)


def test_training_images_may_be_rectangular() -> None:
    rectangular: dict[str, Any] = SMALL | {"image_size": (8, 24)}
    model = PriorVisionForImageClassification(
        PriorVisionConfig(**rectangular, position_table=True)
    )  # fmt: skip
    assert model.config.grid == (2, 6)
    assert model(images(1, 2, 8, 24)).logits.shape == (1, 5)


@pytest.mark.parametrize("name", KINDS)
def test_the_model_learns(name: str) -> None:
    model = made(**KINDS[name], drop_path=0.1, attention_dropout=0.1).train()
    pixels, labels = images(8, 2, 16, 16), torch.arange(8) % 5
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    losses = []
    for _ in range(25):
        loss = model(pixels, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        missing = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
        assert not missing
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] / 2


def test_mixed_labels_train_with_gradient_checkpointing() -> None:
    model, pixels = made(**KINDS["axial"]).train(), images(3, 2, 16, 16)
    shares = torch.rand(3, 5).softmax(-1)
    loss = model(pixels, labels=shares).loss
    grads = torch.autograd.grad(loss, model.model.embeddings.projection.weight)[0]
    model.activation_checkpointing_enable()
    again = torch.autograd.grad(model(pixels, labels=shares).loss, model.model.embeddings.projection.weight)[0]
    torch.testing.assert_close(again, grads)


@pytest.mark.parametrize("are_mixed", [False, True])
def test_accumulated_losses_sum_to_the_whole(are_mixed: bool) -> None:
    """The Trainer accumulates gradients: each part gets the total number of label entries."""
    model: Any = made(prior={"name": "radial", "prior": "laplace"}).eval()
    pixels = images(3, 2, 16, 16)
    labels = torch.rand(3, 5).softmax(-1) if are_mixed else torch.tensor([0, 4, 2])
    items = torch.tensor(labels.numel())
    whole = model(pixels, labels=labels).loss
    parts = [model(pixels[of], labels=labels[of], num_items_in_batch=items).loss for of in (slice(1), slice(1, 3))]
    torch.testing.assert_close(parts[0] + parts[1], whole)


def test_incompatible_arguments_are_named() -> None:
    model: Any = made(prior={"name": "radial", "prior": "laplace"}).eval()
    pixels = images(3, 2, 16, 16)
    with pytest.raises(ValueError, match=r"labels must have shape \(3,\) or \(3, 5\), got \(2,\)"):
        model(pixels, labels=torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="the vision transformer does not take the argument bool_masked_pos"):
        model(pixels, bool_masked_pos=torch.ones(3, 16))


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (torch.tensor([0, 5, 1]), r"labels must be classes from 0 to 4, or -100 to ignore; got 5"),
        (torch.tensor([0, -1, 1]), r"got -1"),
        (torch.tensor([0.0, 1.0, 2.0]), r"labels of shape \(3,\) must be integer classes, got torch.float32"),
        (torch.tensor([True, False, True]), r"got torch.bool"),
        (
            torch.ones(3, 5, dtype=torch.int64),
            r"labels of shape \(3, 5\) must be floating-point probabilities, got torch.int64",
        ),
    ],
)
def test_labels_outside_the_classes_are_refused(labels: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        made()(images(3, 2, 16, 16), labels=labels)


def test_other_losses_are_refused_and_small_integers_are_labels() -> None:
    pixels, labels = images(3, 2, 16, 16), torch.tensor([0, 4, 2])
    torch.testing.assert_close(made()(pixels, labels=labels.int()).loss, made()(pixels, labels=labels).loss)
    with pytest.raises(
        ValueError, match="problem_type must be 'single_label_classification' or None, got 'regression'"
    ):
        made(problem_type="regression")(pixels, labels=labels)


def test_stochastic_depth_keeps_the_mean() -> None:
    layer: Any = made(drop_path=0.5).model.stack.layers[-1].train()
    branch = torch.ones(4000, 1, 1)
    kept = layer._kept(branch)
    assert set(kept.unique().tolist()) == {0.0, 2.0}
    assert float(kept.mean()) == pytest.approx(1.0, abs=0.1)
    assert layer.eval()._kept(branch) is branch


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"image_size": 15}, "image_size=15 must be a multiple of patch_size=4"),
        ({"image_size": [16]}, r"image_size must be one number, or rows and columns; got \[16\]"),
        ({"image_size": "16"}, "image_size must be a positive integer, got '16'"),
        ({"image_size": 16.0}, r"image_size must be a positive integer, got 16\.0"),
        ({"position_table": "no"}, "position_table must be True or False, got 'no'"),
        ({"hidden_size": "a"}, "hidden_size must be a positive integer, got 'a'"),
        ({"drop_path": "a"}, r"drop_path must be in \[0, 1\), got 'a'"),
        ({"pooling": "max"}, "pooling must be one of class, mean; got 'max'"),
        ({"hidden_size": 25}, "hidden_size=25 must be a multiple of num_attention_heads=3"),
        ({"drop_path": 1.0}, r"drop_path must be in \[0, 1\), got 1.0"),
        ({"prior": {"name": "axial", "rows": "window"}}, "rows: unknown prior 'window'"),
        ({"prior": {"name": "key_sink", "train_length": 8, "init": "recency"}}, "slope"),
        ({"prior": "laplace"}, r"prior must be over a grid \(axial, .*\), got 'laplace'"),
    ],
)
def test_invalid_configs_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PriorVisionConfig(**SMALL | options)


@pytest.mark.parametrize(
    ("pixels", "sizes", "message"),
    [
        (images(1, 3, 16, 16), None, r"pixel_values must have shape \(B, 2, rows, columns\)"),
        (images(1, 2, 16, 15), None, "pixel_values must be positive multiples of patch_size=4"),
        (images(2, 2, 16, 16), torch.tensor([[16, 16]]), r"image_sizes must have shape \(2, 2\)"),
        (
            images(1, 2, 16, 16),
            torch.tensor([[16, 20]]),
            r"image_sizes must be positive multiples .* at most \(16, 16\)",
        ),
        (images(1, 2, 16, 16), torch.tensor([[16, 6]]), "image_sizes must be positive multiples"),
    ],
)
def test_invalid_images_are_named(pixels: torch.Tensor, sizes: torch.Tensor | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        made()(pixels, image_sizes=sizes)


# ---- units of the image


@pytest.mark.parametrize("pooling", ["class", "mean"])
@pytest.mark.parametrize("prior", [None, "spectral_2d"], ids=str)
def test_in_image_units_larger_pixels_change_nothing(prior: Any, pooling: str) -> None:
    """With a uniform prior, an image in more patches of one pixel each gives equal logits."""
    sizes = SMALL | {"image_size": [4, 6], "patch_size": 1}
    torch.manual_seed(0)
    config = PriorVisionConfig(**sizes, prior=prior, pooling=pooling, position_units="image")
    model = PriorVisionForImageClassification(config).eval().double()
    pixels = images(2, 2, 4, 6).double()
    larger = pixels.repeat_interleave(2, 2).repeat_interleave(3, 3)
    with torch.no_grad():
        expected = model(pixels).logits
        torch.testing.assert_close(model(larger).logits, expected, rtol=1e-9, atol=1e-9)
        model.config.position_units = "patch"
        alike = torch.allclose(model(larger).logits, expected, rtol=1e-3)
    # One class token among more patches has less weight, but a mean is unchanged.
    assert alike == (pooling == "mean")


def test_in_image_units_nothing_changes_at_the_training_resolution() -> None:
    pixels = images(2, 2, 16, 16)
    for options in KINDS.values():
        if "logit_scale" in options:
            continue
        model = made(**options)
        expected = model(pixels).logits
        model.config.position_units = "image"
        assert torch.equal(model(pixels).logits, expected)


def test_incompatible_units_are_refused() -> None:
    with pytest.raises(ValueError, match=r"position_units must be one of patch, image"):
        made(position_units="pixel")
    with pytest.raises(ValueError, match="rows: clipped_offsets is defined at whole patches only"):
        made(prior={"name": "axial", "rows": "clipped_offsets"}, position_units="image")
    with pytest.raises(ValueError, match="logit_scale='ssmax' needs position_units='patch'"):
        made(logit_scale="ssmax", position_units="image")
    model = made(**KINDS["axial"], position_units="image")
    with pytest.raises(ValueError, match="image_sizes needs position_units='patch'"):
        model(images(2, 2, 16, 16), image_sizes=torch.tensor([[16, 16], [8, 8]]))
