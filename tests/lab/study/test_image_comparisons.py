"""Comparisons of image classifiers: reading, augmentation, training, tests, resumption and results."""

import hashlib
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset, Features
from datasets import Image as DatasetImage
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from recipe_cases import carry_out
from rich.console import Console
from safetensors.torch import load_file
from transformers import AutoImageProcessor, pipeline

from attention_priors._io import read_json
from attention_priors.lab.data.packing import row_seed
from attention_priors.lab.report import overview_table, write_report
from attention_priors.lab.results import Results
from attention_priors.lab.study import ImageRecipe, Recipe, RecipeError, compare, load_recipe
from attention_priors.lab.study.images import load_pictures
from attention_priors.lab.study.images.augmentation import Collate, PictureRows, cutmix, mixup, normalised
from attention_priors.lab.study.images.pictures import processor_for, resized
from attention_priors.lab.study.images.recipe import Augmentation, ImageTrainingSettings, PictureSettings
from attention_priors.lab.study.images.study import ImageStudy, prior_maps
from attention_priors.lab.train.engine import Trained, train
from attention_priors.lab.train.recipe import RunningSettings
from attention_priors.lab.train.trainer import SealedTrainer
from attention_priors.models import PriorVisionConfig, PriorVisionForImageClassification
from attention_priors.priors import grid_positions

ROOT = Path(__file__).parents[3]
TINY: dict[str, Any] = {
    "name": "Tiny digits",
    "images": {"source": "digits"},
    "model": {
        "image_size": 8,
        "patch_size": 2,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    },
    "training": {
        "steps": 6,
        "batch_size": 8,
        "learning_rate": 0.01,
        "optimizer": "adamw",
        "checkpoint_steps": 2,
        "augmentation": {"shift": 0.1, "zoom": [0.8, 1.25], "mixup": 0.8},
        "label_smoothing": 0.1,
    },
    "evaluation": {"sizes": [8, 16]},
    "seeds": [0, 1],
    "schemes": {
        "table": {"position_table": True},
        "GOAT": {"prior": {"name": "spectral_2d", "init": "recency"}, "position_units": "image"},
        "none": {"training": {"steps": 2}},
    },
}


def quiet() -> Console:
    return Console(file=io.StringIO())


def recipe(**changes: Any) -> ImageRecipe:
    return ImageRecipe.model_validate(TINY | changes)


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Results]:
    folder = tmp_path_factory.mktemp("digits")
    return folder, carry_out(recipe(), folder)


def test_every_scheme_is_tested_at_every_size(compared: tuple[Path, Results]) -> None:
    folder, results = compared
    assert results.of_images
    assert results.study["images"]["train"] == 1297
    accuracy = results["accuracy"]
    places = [*zip(accuracy.scheme, accuracy.seed, accuracy["size"], strict=True)]
    assert places == [(name, seed, size) for seed in (0, 1) for name in TINY["schemes"] for size in (8, 16)]
    assert set(accuracy.trials) == {500}
    assert accuracy.correct.between(0, 500).all()
    assert results["run"].steps.tolist() == [6, 6, 2] * 2
    # The stored accuracy is that of the saved model.
    model = PriorVisionForImageClassification.from_pretrained(folder / "runs" / "GOAT" / "seed-1" / "model").eval()
    pictures = load_pictures(PictureSettings(source="digits"))
    images = torch.stack([resized(pictures.test[index][0], 16) for index in range(500)])
    with torch.no_grad():
        found = model(2 * images - 1).logits.argmax(-1)
    right = int((found == torch.tensor([pictures.test[index][1] for index in range(500)])).sum())
    (correct,) = accuracy.query("scheme == 'GOAT' and seed == 1 and size == 16").correct
    assert correct == right
    assert model.config.id2label[3] == "3"


def test_results_are_shown(compared: tuple[Path, Results], tmp_path: Path) -> None:
    _, results = compared
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures" / "prior_maps_07.png").write_bytes(b"of a scheme that there was")
    text = write_report(results, tmp_path).read_text()
    assert "Accuracy at other resolutions" in text
    assert "http" not in text.replace("http-equiv", "")
    names = {path.name for path in (tmp_path / "figures").iterdir()}
    assert names == {"accuracy_by_size.png", "prior_maps_02.png"}
    shares = results["accuracy"].query("scheme == 'table' and size == 16").correct / 5
    assert f"| {shares.mean():.1f} " in (tmp_path / "tables" / "accuracy.md").read_text()
    assert (tmp_path / "tables" / "training.tex").exists()
    assert len(overview_table(results).lines) == 3


def test_finished_runs_are_reused(compared: tuple[Path, Results], monkeypatch: pytest.MonkeyPatch) -> None:
    folder, results = compared
    monkeypatch.setattr("subprocess.Popen", lambda *arguments, **options: pytest.fail("a worker was started"))
    again = compare(recipe(), folder, console=quiet())
    assert again["accuracy"].equals(results["accuracy"])
    other = TINY["training"] | {"learning_rate": 0.02}
    with pytest.raises(RecipeError, match=r"learning_rate \(there 0.01, here 0.02\)"):
        compare(recipe(training=other), folder, console=quiet())


def test_interrupted_trainings_resume_with_equal_weights(
    compared: tuple[Path, Results], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = ImageStudy(recipe())
    # Seeds of other devices must not be set: a checkpoint holds their states.
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: pytest.fail("all devices were seeded"))
    monkeypatch.setattr("attention_priors.lab.study.images.study.set_seed", torch.default_generator.manual_seed)
    monkeypatch.setattr("transformers.trainer.set_seed", lambda *arguments, **options: None)

    def interrupt(stage: str, done: int, total: int) -> None:
        if (stage, done) == ("train", 3):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        study.execute(tmp_path, "GOAT", 1, interrupt)
    run = Path("runs", "GOAT", "seed-1")
    assert not (tmp_path / run / "model").exists()
    study.execute(tmp_path, "GOAT", 1, lambda *arguments: None)
    one, other = (
        hashlib.sha256((folder / run / "model" / "model.safetensors").read_bytes()).hexdigest()
        for folder in (tmp_path, compared[0])
    )
    assert one == other
    assert json.loads((tmp_path / run / "accuracy.json").read_text()) == json.loads(
        (compared[0] / run / "accuracy.json").read_text()
    )


def test_reading_processes_change_no_result(compared: tuple[Path, Results], tmp_path: Path) -> None:
    running = {"workers": 2, "activation_checkpointing": True}
    ImageStudy(recipe(running=running)).execute(tmp_path, "GOAT", 1, lambda *arguments: None)
    run = Path("runs", "GOAT", "seed-1")
    one, other = (load_file(folder / run / "model" / "model.safetensors") for folder in (tmp_path, compared[0]))
    for name, weights in one.items():
        torch.testing.assert_close(weights, other[name], msg=name)
    found, expected = (read_json(folder / run / "accuracy.json") for folder in (tmp_path, compared[0]))
    assert found == expected


def test_the_time_of_a_training_survives_a_failure_to_save_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any) -> None:
        raise OSError("No space left on device")

    study, run = ImageStudy(recipe()), tmp_path / "runs" / "none" / "seed-0"
    with monkeypatch.context() as patch:
        patch.setattr(Trained, "save", full)
        with pytest.raises(OSError, match="No space left"):
            study.execute(tmp_path, "none", 0, lambda *arguments: None)
    seconds = run / "train_seconds.json"
    seconds.write_text(str(1000 + json.loads(seconds.read_text())))
    study.execute(tmp_path, "none", 0, lambda *arguments: None)
    assert json.loads((run / "training.json").read_text())["train_seconds"] >= 1000
    assert not seconds.exists()


@pytest.mark.parametrize("rows_at_a_time", [8, 4, 2])
def test_accumulated_passes_have_the_mean_of_their_losses(rows_at_a_time: int, tmp_path: Path) -> None:
    pictures, changes = load_pictures(PictureSettings(source="digits")), settings(batch_size=8, steps=2)
    torch.manual_seed(0)
    model = PriorVisionForImageClassification(recipe().config_of("table", channels=1, classes=10))
    rows = PictureRows(pictures.train, 8, 16, seed=0, augmentation=Augmentation())
    with torch.no_grad():
        expected = float(model(**Collate(changes, 10, seed=0)([rows[index] for index in range(8)])).loss)
    trained = train(
        model,
        rows,
        changes,
        tmp_path,
        collate=Collate(changes, 10, seed=0),
        seed=0,
        running=RunningSettings(rows_at_a_time=rows_at_a_time),
        shuffle=False,
        trainer_class=SealedTrainer,
    )
    assert trained.history[0]["loss"] == pytest.approx(expected, rel=1e-4)


def test_schemes_change_the_augmentation_key_by_key() -> None:
    own = {"none": {"training": {"augmentation": {"mixup": 0.2}}}}
    found = recipe(schemes=own).training_of("none").augmentation
    assert (found.mixup, found.shift, found.zoom) == (0.2, 0.1, (0.8, 1.25))


def test_failed_runs_are_named(tmp_path: Path) -> None:
    wrong = TINY["training"] | {"learning_rate": 1e30, "steps": 40}
    with pytest.raises(FloatingPointError, match="try a lower learning_rate"):
        carry_out(recipe(training=wrong, seeds=[0]), tmp_path, only=["table"])


# ---- random rows and batches


def settings(**changes: Any) -> ImageTrainingSettings:
    return ImageTrainingSettings.model_validate({"steps": 1, "batch_size": 4, "learning_rate": 0.1} | changes)


def test_every_epoch_reads_every_image_once() -> None:
    pictures = load_pictures(PictureSettings(source="digits"))
    rows = PictureRows(pictures.train, 8, 2 * 1297, seed=3, augmentation=Augmentation())
    for epoch in range(2):
        found = torch.stack([rows[epoch * 1297 + index]["image"] for index in range(1297)]).flatten(1)
        expected = torch.stack([pictures.train[index][0] for index in range(1297)]).flatten(1)
        assert sorted(map(tuple, found.tolist())) == sorted(map(tuple, expected.tolist()))
    assert rows[0]["label"] == PictureRows(pictures.train, 8, 5, seed=3, augmentation=Augmentation())[0]["label"]
    orders = [[rows[start + index]["label"] for index in range(50)] for start in (0, 1297)]
    assert orders[0] != orders[1]
    with pytest.raises(IndexError):
        rows[2 * 1297]


AUGMENTATIONS: dict[str, Any] = {
    "none": {},
    "affine": {"shift": 0.2, "zoom": [0.7, 1.4], "moved": 0.5},
    "flip, erase": {"flip": 0.5, "erase": 0.5},
    "RandAugment": {"rand_augment": [2, 9]},
    "both mixes": {"mixup": 0.8, "cutmix": 1.0},
}


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_batches_depend_only_on_their_rows(name: str) -> None:
    pictures = load_pictures(PictureSettings(source="digits"))
    changes = settings(augmentation=AUGMENTATIONS[name] | {"crop": [0.3, 0.9]}, label_smoothing=0.1)
    rows = PictureRows(pictures.train, 16, 100, seed=0, augmentation=changes.augmentation)
    collate = Collate(changes, 10, seed=0)
    torch.manual_seed(7)
    before = torch.random.get_rng_state()
    first = collate([rows[index] for index in range(4)])
    assert torch.equal(torch.random.get_rng_state(), before)
    other = collate([rows[index] for index in range(4, 8)])
    again = collate([rows[index] for index in range(4)])
    assert all(torch.equal(first[key], again[key]) for key in ("pixel_values", "labels"))
    assert not torch.equal(first["pixel_values"], other["pixel_values"])
    assert first["pixel_values"].shape == (4, 1, 16, 16)
    assert -1.001 <= float(first["pixel_values"].min()) <= float(first["pixel_values"].max()) <= 1.001
    torch.testing.assert_close(first["labels"].sum(1), torch.ones(4))
    assert float(first["labels"].min()) >= 0.01 - 1e-6


def test_batch_augmentation_is_independent_of_row_augmentation() -> None:
    """Correlates the white part of the first cut of half-white images with the flip of the batch."""
    white, flipped = [], []
    picture = torch.zeros(1, 1, 8)
    picture[..., 4:] = 1
    changes = settings(augmentation={"flip": 0.5}, label_smoothing=0)
    for seed in range(200):
        collate = Collate(changes, 2, seed)
        with torch.random.fork_rng():
            torch.manual_seed(row_seed(seed, 0))
            white.append(float(torch.rand(())))  # the first random number of the row's own cut
        batch = collate([{"row": 0, "image": picture, "label": 0}])
        flipped.append(float(batch["pixel_values"][0, 0, 0, 0] > 0))
    assert 60 < sum(flipped) < 140
    assert abs(float(np.corrcoef(white, flipped)[0, 1])) < 0.25


def test_moved_sets_the_share_of_moved_images() -> None:
    pictures = load_pictures(PictureSettings(source="digits"))
    changes = settings(augmentation={"shift": 0.2, "zoom": [0.7, 1.4], "moved": 0.25})
    rows = PictureRows(pictures.train, 8, 400, seed=0, augmentation=changes.augmentation)
    given = [rows[index] for index in range(400)]
    found = Collate(changes, 10, seed=0)(given)["pixel_values"]
    as_they_were = (found == torch.stack([row["image"] for row in given]) * 2 - 1).flatten(1).all(1)
    assert 0.65 < float(as_they_were.float().mean()) < 0.85


@given(seed=st.integers(0, 1000), parameter=st.floats(0.2, 3))
def test_class_shares_follow_the_pixels(seed: int, parameter: float) -> None:
    """Each image is constant, so mixed images show its share."""
    torch.manual_seed(seed)
    numbers = torch.arange(1.0, 6.0)
    images, shares = numbers.view(5, 1, 1, 1).expand(5, 2, 12, 10), torch.eye(5)
    for mix in (mixup, cutmix):
        mixed, found = mix(images, shares, parameter)
        assert mixed.shape == images.shape
        torch.testing.assert_close(found.sum(1), torch.ones(5))
        torch.testing.assert_close(mixed.mean((1, 2, 3)), found @ numbers)
    pieces = cutmix(images, shares, parameter)[0]
    assert set(pieces.flatten().tolist()) <= set(numbers.tolist())


@given(rows=st.integers(4, 40), columns=st.integers(4, 40), size=st.integers(2, 30))
def test_scaling_keeps_the_middle(rows: int, columns: int, size: int) -> None:
    image = torch.full((2, rows, columns), 0.4)
    scaled = resized(image, size)
    assert scaled.shape == (2, size, size)
    torch.testing.assert_close(scaled, torch.full((2, size, size), 0.4))
    # The left half is black and the right half white, also in the middle.
    image[..., : columns // 2], image[..., columns // 2 :] = 0, 1
    assert float(resized(image, size)[..., 0].mean()) <= float(resized(image, size)[..., -1].mean())


@given(rows=st.integers(8, 60), columns=st.integers(8, 60), size=st.integers(4, 24), channels=st.sampled_from([1, 3]))
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_the_saved_processor_reproduces_test_images(
    rows: int, columns: int, size: int, channels: int, interpolation: str
) -> None:
    smooth = np.add.outer(np.linspace(0, 3, rows), np.linspace(0, 5, columns))
    pixels = np.stack([127 + 100 * np.sin(smooth + one) for one in range(channels)], axis=-1).astype(np.uint8)
    picture = Image.fromarray(pixels if channels == 3 else pixels[..., 0])
    config = PriorVisionConfig(**TINY["model"] | {"image_size": size, "patch_size": 1, "num_channels": channels})
    found = processor_for(config, interpolation)(picture, return_tensors="pt")["pixel_values"][0]
    expected = normalised(resized(torch.from_numpy(pixels).movedim(-1, 0) / 255, size, interpolation))
    # The processor rounds to integers from 0 to 255, and PyTorch's bicubic filter sharpens more when it enlarges.
    torch.testing.assert_close(found, expected, rtol=0, atol=0.02 if interpolation == "bilinear" else 0.1)


def test_finished_models_have_their_processor(compared: tuple[Path, Results]) -> None:
    pictures = load_pictures(PictureSettings(source="digits"))
    model = compared[0] / "runs" / "GOAT" / "seed-1" / "model"
    processor: Any = AutoImageProcessor.from_pretrained(model)
    for index in range(3):
        image, _ = pictures.test[index]
        picture = Image.fromarray((image[0] * 255).round().to(torch.uint8).numpy())
        found = processor(picture, return_tensors="pt")["pixel_values"]
        torch.testing.assert_close(found, normalised(image)[None], rtol=0, atol=1.01 / 255)


def test_pipelines_accept_images_of_any_size(tmp_path: Path) -> None:
    """The pipeline returns names of classes, and converts all images to colour."""
    positions = {"prior": "spectral_2d", "id2label": {0: "a", 1: "b", 2: "c"}}
    config = PriorVisionConfig(**TINY["model"] | positions)
    PriorVisionForImageClassification(config).save_pretrained(tmp_path)
    processor_for(config, "bilinear").save_pretrained(tmp_path)
    classify: Any = pipeline("image-classification", model=str(tmp_path))
    pixels = np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8)
    scores = {one["label"]: one["score"] for one in classify(Image.fromarray(pixels))}
    image = resized(torch.from_numpy(pixels).movedim(-1, 0) / 255, 8)
    with torch.no_grad():
        expected = classify.model(normalised(image)[None]).logits[0].softmax(-1)
    assert [scores[name] for name in "abc"] == pytest.approx(expected.tolist(), abs=1e-3)


# ---- external images


@pytest.fixture
def folder_of_images(tmp_path: Path) -> Path:
    draw = np.random.default_rng(0)
    for split in ("train", "test"):
        for kind, low in (("dark", 0), ("light", 128)):
            place = tmp_path / "pictures" / split / kind
            place.mkdir(parents=True)
            for index in range(6):
                pixels = draw.integers(low, low + 128, (20 + index, 16, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(place / f"{index}.png")
    return tmp_path / "pictures"


def test_cropped_images_are_resized_like_test_images() -> None:
    noise = torch.rand(1, 200, 200, generator=torch.Generator().manual_seed(0))
    noisy: Any = [(noise, 0)]
    whole = PictureRows(noisy, 50, 4, 0, Augmentation(crop=(1.0, 1.0)))[0]["image"]
    torch.testing.assert_close(whole, resized(noise, 50), rtol=0, atol=1e-6)
    rows = PictureRows(noisy, 50, 8, 0, Augmentation(crop=(0.3, 0.9)))
    cuts = torch.stack([rows[index]["image"] for index in range(8)])
    assert cuts.shape == (8, 1, 50, 50)
    assert len({round(float(cut.mean()), 5) for cut in cuts}) == 8  # eight different places
    assert float(cuts.std()) < 0.6 * float(noise.std())
    assert abs(float(cuts.mean()) - 0.5) < 0.02


def test_hugging_face_datasets_load(folder_of_images: Path, tmp_path: Path) -> None:
    source = {"path": "imagefolder", "data_dir": str(folder_of_images)}
    pictures = load_pictures(PictureSettings.model_validate({"dataset": source}))
    assert (pictures.classes, pictures.channels) == (("dark", "light"), 3)
    assert (len(pictures.train), len(pictures.test)) == (12, 12)
    image, label = pictures.train[11]
    assert image.shape == (3, 25, 16)
    assert label == 1
    assert float(image.mean()) > 0.5
    changes: dict[str, Any] = {
        "images": {"dataset": source},
        "training": TINY["training"]
        | {"steps": 30, "augmentation": {"crop": [0.5, 1.0], "flip": 0.5}, "label_smoothing": 0},
        "seeds": [0],
        "schemes": {"table": {"position_table": True}},
    }
    results = carry_out(recipe(**changes), tmp_path / "out")
    assert results["accuracy"].correct.tolist() == [12, 12]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data_dir": "nowhere"}, "images.dataset: 'imagefolder', 'train', cannot be loaded"),
        ({"label": "kind"}, "images.dataset.label: 'imagefolder' has no ClassLabel 'kind'"),
        ({"image": "label"}, "images.dataset.image: 'imagefolder' has no Image 'label'"),
        ({"test": "dev"}, "'dev', cannot be loaded"),
    ],
)
def test_unreadable_datasets_are_named(folder_of_images: Path, changes: Any, message: str) -> None:
    source = {"path": "imagefolder", "data_dir": str(folder_of_images)} | changes
    with pytest.raises(RecipeError, match=message):
        ImageStudy(recipe(images={"dataset": source}))


def test_damaged_images_are_named(folder_of_images: Path) -> None:
    source = {"dataset": {"path": "imagefolder", "data_dir": str(folder_of_images)}}
    last = sorted(folder_of_images.glob("train/*/*.png"))[-1]
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)).save(last)
    last.write_bytes(last.read_bytes()[:3000])
    pictures = load_pictures(PictureSettings.model_validate(source))
    with pytest.raises(ValueError, match=rf"'train', image 11 \(.*{last.name}\), cannot be read: "):
        pictures.train[11]
    first = sorted(folder_of_images.glob("test/*/*.png"))[0]
    first.write_bytes(b"no image")
    with pytest.raises(RecipeError, match=rf"'test', image 0 \(.*{first.name}\), cannot be read: "):
        ImageStudy(recipe(images=source))


def test_images_with_more_than_8_bits_are_refused(folder_of_images: Path) -> None:
    for path in folder_of_images.glob("test/*/*.png"):
        Image.fromarray(np.full((8, 8), 1000, dtype=np.uint16)).save(path)
    source = {"dataset": {"path": "imagefolder", "data_dir": str(folder_of_images)}}
    with pytest.raises(RecipeError, match=r"'test', image 0, has mode 'I(;16)?': expected 8 bits per channel"):
        ImageStudy(recipe(images=source))
    last = sorted(folder_of_images.glob("train/*/*.png"))[-1]
    for path in folder_of_images.glob("test/*/*.png"):
        Image.fromarray(np.zeros((8, 8, 3), dtype=np.uint8)).save(path)
    Image.fromarray(np.full((8, 8), 1000, dtype=np.uint16)).save(last)
    pictures = load_pictures(PictureSettings.model_validate(source))
    with pytest.raises(ValueError, match=r"'train', image 11, has mode 'I(;16)?'"):
        pictures.train[11]


def test_mixed_colour_and_grey_images_are_refused(folder_of_images: Path) -> None:
    first = min(folder_of_images.glob("train/*/*.png"))
    Image.fromarray(np.full((8, 8), 100, dtype=np.uint8)).save(first)
    source: dict[str, Any] = {"path": "imagefolder", "data_dir": str(folder_of_images)}
    pictures = load_pictures(PictureSettings.model_validate({"dataset": source}))
    assert pictures.channels == 1
    with pytest.raises(ValueError, match=r"image 1, has mode 'RGB', but the first training image is grey"):
        pictures.train[1]
    for channels in (1, 3):
        pictures = load_pictures(PictureSettings.model_validate({"dataset": source | {"channels": channels}}))
        assert {pictures.train[index][0].shape[0] for index in range(12)} == {channels}


def test_images_without_labels_are_refused(tmp_path: Path) -> None:
    features = Features({"image": DatasetImage(), "label": ClassLabel(names=["dark", "light"])})
    picture = Image.fromarray(np.zeros((8, 8), dtype=np.uint8))
    for hidden in (-1, None):
        folder = tmp_path / str(hidden)
        folder.mkdir()
        for split, labels in (("train", [0, 1]), ("test", [0, hidden])):
            rows = Dataset.from_dict({"image": [picture] * 2, "label": labels}, features=features)
            rows.to_parquet(str(folder / f"{split}.parquet"))
        with pytest.raises(RecipeError, match=rf"'test', has images without a class \({hidden}\): expected 0 to 1"):
            ImageStudy(recipe(images={"dataset": {"path": "parquet", "data_dir": str(folder)}}))


# ---- recipes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"images": {}}, "set exactly one of source and dataset; got none"),
        ({"evaluation": {"sizes": [8, 9]}}, "multiples of the patch size, 2 pixels"),
        ({"evaluation": {"sizes": [16, 8]}}, "sizes must rise"),
        ({"schemes": {"a": {"prior": "laplace"}}}, "schemes.a: "),
        (
            {"schemes": {"a": {"prior": {"name": "axial", "rows": "clipped_offsets"}, "position_units": "image"}}},
            "rows",
        ),
        ({"schemes": {"a": {"training": {"steps": 0}}}}, "schemes.a.training: steps"),
        ({"schemes": {"a b": {}, "a_b": {}}}, "would share the folder"),
        ({"training": TINY["training"] | {"augmentation": {"zoom": [2, 1]}}}, "zoom must be the smallest"),
        ({"training": TINY["training"] | {"warmup_steps": 6}}, "warmup_steps=6 must be less"),
        ({"seeds": [1, 1]}, "seeds must be distinct"),
        ({"corpus": {}}, "corpus: unknown key"),
    ],
)
def test_invalid_recipes_are_named(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(TINY | changes))
    with pytest.raises(RecipeError, match=message):
        load_recipe(path)


@pytest.mark.parametrize("name", ["digits", "goat-vit-s16", "cifar10"])
def test_committed_image_recipes_are_valid(name: str) -> None:
    path = ROOT / "recipes" / f"{name}.yaml"
    if not path.exists():
        pytest.skip("not a checkout of the project")
    found = load_recipe(path)
    assert isinstance(found, ImageRecipe)
    assert not isinstance(found, Recipe)
    for scheme in found.schemes:
        with torch.device("meta"):
            model = PriorVisionForImageClassification(found.config_of(scheme, channels=3, classes=1000))
        if name == "goat-vit-s16":
            assert round(model.num_parameters() / 1e6) == 22


def test_prior_maps_are_centred() -> None:
    sizes = TINY["model"] | {"image_size": 10, "num_channels": 1, "num_labels": 2}
    config = PriorVisionConfig(**sizes, prior={"name": "radial", "prior": "laplace"})
    model = PriorVisionForImageClassification(config)
    maps = prior_maps(model)
    assert [(row["layer"], row["head"]) for row in maps] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    positions = grid_positions(5, 5)
    layers: Any = model.model.stack.layers
    prior = layers[1].self_attn.prior
    expected = prior.log_prior(positions[12:13], positions, torch.float64)[1, 0].view(5, 5)
    assert maps[3]["log_prior"] == [[round(float(x), 4) for x in line] for line in expected]
    assert maps[3]["log_prior"][2][2] == 0
    config.prior = None
    assert prior_maps(PriorVisionForImageClassification(config)) == []
