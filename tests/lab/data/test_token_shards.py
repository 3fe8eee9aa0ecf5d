"""Prepared tokens on disk match the documents, also after interruptions."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from attention_priors.lab.data import Corpus, Document, token_stream, train_tokenizer
from attention_priors.lab.data.packing import IGNORED_LABEL, collate_rows
from attention_priors.lab.data.preparation import Preparation, prepare, prepared_tokenizer
from attention_priors.lab.data.shards import PackedRows, ShardError, TokenShards, read_manifest, shards_of
from attention_priors.lab.data.sources import DataSettings, HubDataset
from attention_priors.lab.strict_yaml import RecipeError


@pytest.fixture(scope="module")
def texts(documents: tuple[Document, ...]) -> list[str]:
    """Enough documents for several batches."""
    return [document.text[start : start + 60] for document in documents for start in range(0, 1200, 60)]


@pytest.fixture(scope="module")
def saved_tokenizer(tokenizer, tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def json_lines(texts: list[str], tmp_path_factory) -> Path:
    """Write two files in the Hub's format, with one blank text."""
    folder = tmp_path_factory.mktemp("json")
    rows = [json.dumps({"id": index, "text": text}) for index, text in enumerate(texts)]
    half = len(rows) // 2
    (folder / "a.jsonl").write_text("\n".join([*rows[:half], json.dumps({"id": -1, "text": " "})]) + "\n")
    (folder / "b.jsonl").write_text("\n".join(rows[half:]) + "\n")
    return folder


@pytest.fixture(scope="module")
def make(json_lines: Path, saved_tokenizer: str):
    def preparation(documents: Any = None, **changes: Any) -> Preparation:
        source = HubDataset(path="json", data_files=str(json_lines / "*.jsonl"))
        options: dict[str, Any] = {
            "tokenizer": saved_tokenizer,
            "held_out_tokens": 500,
            "max_tokens": None,
            "shard_tokens": 2000,
        }
        return Preparation(documents or source, **options | changes)

    return preparation


@pytest.fixture(scope="module")
def prepared(make, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("prepared") / "tokens"
    prepare(make(), folder)
    return folder


def _all(folder: Path, part: str) -> tuple[torch.Tensor, torch.Tensor]:
    shards = TokenShards(folder, part)
    return shards.window(0, len(shards))


def _files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.npy")}


def test_tokens_and_documents_match_the_text(prepared: Path, texts: list[str], tokenizer):
    stream = token_stream(tokenizer, [Document(str(index), text) for index, text in enumerate(texts)])
    (held, held_documents), (train, train_documents) = (_all(prepared, part) for part in ("held_out", "train"))
    assert torch.equal(torch.cat([held, train]), stream.tokens)
    assert torch.equal(torch.cat([held_documents, train_documents + held_documents[-1] + 1]), stream.document_ids)
    assert 500 <= len(held) < 600
    assert len(read_manifest(prepared)["parts"]["train"]) > 2
    assert prepared_tokenizer(prepared).get_vocab() == tokenizer.get_vocab()


def test_other_files_or_tokenizers_invalidate_tokens(json_lines: Path, saved_tokenizer: str, tmp_path):
    rows, tokenizer = (
        Path(shutil.copytree(source, tmp_path / name))
        for source, name in ((json_lines, "rows"), (saved_tokenizer, "tok"))
    )
    settings = {"held_out_tokens": 500, "max_tokens": None, "shard_tokens": 2000, "tokenizer": str(tokenizer)}

    def again(path: str, files: str | None) -> None:
        prepare(Preparation(HubDataset(path=path, data_files=files), **settings), tmp_path / f"of-{path[-4:]}")

    for path, files in (("json", str(rows / "*.jsonl")), (str(rows), None)):
        again(path, files)
        again(path, files)
        content = (rows / "a.jsonl").read_text()
        (rows / "a.jsonl").write_text(content.replace("a", "b"))  # of equal length
        with pytest.raises(RecipeError, match="they differ in files"):
            again(path, files)
        (rows / "a.jsonl").write_text(content)
    # A missing source keeps the tokens valid; a changed source does not.
    tokenizer.rename(tmp_path / "aside")
    again(str(rows), None)
    other = train_tokenizer([Document("x", "other words " * 50)], 260)
    other.save_pretrained(tokenizer)
    with pytest.raises(RecipeError, match="they differ in tokenizer_fingerprint"):
        again(str(rows), None)


def test_a_window_may_begin_and_end_anywhere(prepared: Path):
    shards = TokenShards(prepared)
    tokens, documents = _all(prepared, "train")
    generator = np.random.default_rng(0)
    ends = np.cumsum([shard.tokens for shard in shards.shards])
    starts = [*generator.integers(0, len(shards) - 700, 30).tolist(), int(ends[0]) - 1, int(ends[0]), 0]
    for start in starts:
        for size in (1, 2, 700):
            found, of = shards.window(start, size)
            assert torch.equal(found, tokens[start : start + size])
            assert torch.equal(of, documents[start : start + size])
    with pytest.raises(IndexError):
        shards.window(len(shards) - 1, 2)


def test_parquet_and_json_give_equal_tokens(prepared: Path, json_lines: Path, make, tmp_path):
    from datasets import Dataset, load_dataset

    rows = load_dataset("json", data_files=str(json_lines / "*.jsonl"), split="train")
    assert isinstance(rows, Dataset)
    half = len(rows) // 2
    rows.select(range(half)).to_parquet(tmp_path / "0.parquet")
    rows.select(range(half, len(rows))).to_parquet(tmp_path / "1.parquet")
    source = HubDataset(path="parquet", data_files=str(tmp_path / "*.parquet"))
    prepare(make(source), tmp_path / "tokens")
    assert _files(tmp_path / "tokens") == _files(prepared)


def test_corpora_keep_their_held_out_part(make, texts, tokenizer, tmp_path):
    documents = tuple(Document(str(index), text) for index, text in enumerate(texts[:50]))
    corpus = Corpus("made-up", documents[:40], documents[40:])
    prepare(make(corpus), tmp_path)
    for part, expected in (("train", documents[:40]), ("held_out", documents[40:])):
        assert torch.equal(_all(tmp_path, part)[0], token_stream(tokenizer, expected).tokens)


def test_a_tokenizer_may_be_trained_on_the_documents(make, tmp_path):
    prepare(make(tokenizer=300), tmp_path)
    assert len(prepared_tokenizer(tmp_path)) == 300


def test_preparation_ends_at_max_tokens(make, prepared, tmp_path):
    for wanted in (1, 10, 3000):
        prepare(make(max_tokens=wanted), tmp_path / str(wanted))
        for found, all_of_them in zip(_all(tmp_path / str(wanted), "train"), _all(prepared, "train"), strict=True):
            assert torch.equal(found, all_of_them[:wanted])


def test_limits_hold_within_a_batch_of_documents(make, texts, tokenizer, tmp_path):
    """64 documents are encoded at a time. Files and the preparation may end within a batch."""
    documents = tuple(Document(str(index), text) for index, text in enumerate(texts[:60]))
    whole = token_stream(tokenizer, documents[5:]).tokens
    longest = max(len(token_stream(tokenizer, [document]).tokens) for document in documents)
    sizes = {"shard_tokens": 2 * longest, "max_tokens": len(whole) // 2}
    prepare(make(Corpus("made-up", documents[5:], documents[:5]), **sizes), tmp_path)
    shards = shards_of(read_manifest(tmp_path), "train")
    assert len(shards) > 1
    assert all(shard.tokens < 3 * longest for shard in shards)
    assert torch.equal(_all(tmp_path, "train")[0], whole[: sizes["max_tokens"]])


class _StopError(Exception):
    pass


@pytest.mark.parametrize("stop", [1, 3, 6, 9])
def test_interrupted_preparations_give_equal_tokens(make, prepared, tmp_path, stop):
    steps: list[int] = []

    def on_tokens(part: str, tokens: int) -> None:
        steps.append(tokens)
        if len(steps) == stop:
            raise _StopError

    with pytest.raises(_StopError):
        prepare(make(), tmp_path, on_tokens=on_tokens)
    assert not read_manifest(tmp_path)["complete"]
    with pytest.raises(ShardError, match="are not all prepared"):
        TokenShards(tmp_path)
    prepare(make(), tmp_path)
    assert _files(tmp_path) == _files(prepared)
    assert read_manifest(tmp_path) == read_manifest(prepared)


def test_existing_tokens_are_reused(make, prepared):
    prepare(make(), prepared, on_tokens=lambda part, tokens: pytest.fail("it was"))


@pytest.mark.parametrize(
    "changes", [{"held_out_tokens": 600}, {"shard_tokens": 3000}, {"tokenizer": 300}, {"max_tokens": 5}]
)
def test_tokens_of_another_preparation_are_refused(make, prepared, changes):
    with pytest.raises(RecipeError, match=f"holds other tokens; they differ in {next(iter(changes))} "):
        prepare(make(**changes), prepared)


# ---- damage


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


DAMAGE = {"cut off": _cut, "one bit": _flip, "missing": Path.unlink}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
@pytest.mark.parametrize("name", ["train-00001.tokens.npy", "train-00001.starts.npy", "held_out-00000.tokens.npy"])
def test_damaged_shards_are_named_and_replaced(make, prepared, tmp_path, name, damage):
    folder = Path(shutil.copytree(prepared, tmp_path / "tokens"))
    damage(folder / name)
    part = name.split("-")[0]
    with pytest.raises(ShardError, match=rf"{name} is (missing|corrupt)"):
        _all(folder, part)
    messages: list[str] = []
    prepare(make(), folder, repair=True, on_message=messages.append)
    assert len(messages) == 1
    assert name in messages[0]
    assert _files(folder) == _files(prepared)


def test_temporary_files_of_a_killed_preparation_are_deleted(make, prepared, tmp_path):
    shutil.copytree(prepared, tmp_path / "copy")
    left = tmp_path / "copy" / ".train-00001.tokens.npy.12345.0123456789abcdef.tmp"
    left.write_bytes(b"half")
    prepare(make(), tmp_path / "copy")
    assert not left.exists()
    assert _files(tmp_path / "copy") == _files(prepared)


def test_another_tokenizer_beside_the_tokens_is_refused(prepared, make, tmp_path):
    folder = Path(shutil.copytree(prepared, tmp_path / "tokens"))
    path = folder / "tokenizer" / "tokenizer.json"
    path.write_text(path.read_text().replace('"individual_digits": true', '"individual_digits": false'))
    with pytest.raises(ShardError, match="is not the tokenizer that made the tokens"):
        prepared_tokenizer(folder)


def test_a_full_disk_keeps_finished_shards(make, prepared, tmp_path, monkeypatch):
    written = []

    def write_array(file: Any, array: np.ndarray, allow_pickle: bool) -> None:
        written.append(array)
        if len(written) > 5:
            raise OSError(28, "No space left on device", str(tmp_path))
        np.lib.format.write_array(file, array, allow_pickle=allow_pickle)

    with monkeypatch.context() as patch:
        patch.setattr("attention_priors.lab.data.preparation.write_array", write_array)
        with pytest.raises(OSError, match="No space left on device"):
            prepare(make(), tmp_path)
    assert len(read_manifest(tmp_path)["parts"]["train"]) >= 1
    prepare(make(), tmp_path)
    assert _files(tmp_path) == _files(prepared)


def test_empty_training_parts_are_refused(make, tmp_path):
    with pytest.raises(ValueError, match=r"nothing is left to train on.* held_out_tokens is 100000000"):
        prepare(make(held_out_tokens=100_000_000), tmp_path)


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ({"path": "json", "data_files": "nowhere.jsonl"}, "'json' cannot be loaded"),
        ({"path": "json", "data_files": "nope*.jsonl"}, r"no file matches data_files='nope\*\.jsonl'"),
        ({"path": "json", "text": "body"}, "has NoneType under 'body', not text; its fields are id, text"),
        ({"path": "json", "text": "id"}, "has int under 'id', not text"),
        ({"path": "json", "split": "test"}, "'json' cannot be loaded"),
    ],
)
def test_unreadable_datasets_are_named(make, json_lines, tmp_path, source, complaint):
    settings = HubDataset.model_validate({"data_files": str(json_lines / "*.jsonl")} | source)
    with pytest.raises(ValueError, match=complaint):
        prepare(make(settings), tmp_path)


@pytest.mark.parametrize("given", [{}, {"text": "a", "shards": "b"}])
def test_data_settings_accept_one_source(given):
    with pytest.raises(ValueError, match=r"set exactly one of text, .* and shards; got (none|text and shards)"):
        DataSettings.model_validate(given)


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        (
            {"shards": "x", "max_tokens": 5, "held_out_tokens": 1_000_000, "shard_tokens": 7},
            "prepared already: remove the settings without an effect, got max_tokens=5 and held_out_tokens=1000000",
        ),
        ({"text": "x", "held_out_tokens": 5}, "the held-out part of a text is fixed: .* got held_out_tokens=5"),
        ({"fasta": {"path": "x", "held_out": ["a"]}, "held_out_tokens": 5}, "fasta.held_out names the held-out"),
    ],
)
def test_settings_without_effect_are_refused(given, complaint):
    with pytest.raises(ValueError, match=complaint):
        DataSettings.model_validate(given)


def test_settings_with_effect_are_accepted():
    for given in (
        {"shards": "x", "max_tokens": None, "order": "as_read"},
        {"text": "x", "max_tokens": 5, "shard_tokens": 7},
        {"dataset": {"path": "x"}, "max_tokens": 5, "held_out_tokens": 5, "shard_tokens": 7},
        {"fasta": {"path": "x"}, "max_tokens": 5, "held_out_tokens": 5, "shard_tokens": 7},
    ):
        settings = DataSettings.model_validate(given)
        assert DataSettings.model_validate(settings.model_dump(exclude_defaults=True)) == settings


def test_datasets_resume_after_any_text(json_lines, texts):
    documents = HubDataset(path="json", data_files=str(json_lines / "*.jsonl"))
    read = list(documents.read("train"))
    assert [text for text, _ in read] == texts
    for index in (0, 17, len(texts) // 2 - 1, len(texts) // 2, len(texts) - 2):
        state = json.loads(json.dumps(read[index][1]))
        assert [text for text, _ in documents.read("train", state)] == texts[index + 1 :]


# ---- rows


def _rows(folder: Path, **options: Any) -> PackedRows:
    return PackedRows(TokenShards(folder), **{"context_length": 32} | options)


def _same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def test_sequential_rows_are_the_tokens(prepared):
    rows = _rows(prepared)
    tokens, documents = _all(prepared, "train")
    assert rows.blocks == len(tokens) // 32 == len(rows)
    for index in range(len(rows)):
        row, of = rows[index], documents[32 * index : 32 * index + 32]
        assert torch.equal(row["input_ids"], tokens[32 * index : 32 * index + 32])
        assert torch.equal(row["document_ids"], of - of[0])
        first = torch.tensor([True, *(of[1:] != of[:-1]).tolist()])
        assert torch.equal(row["labels"] == IGNORED_LABEL, first)
        assert torch.equal(row["labels"][~first], row["input_ids"][~first])
        assert torch.equal(row["loss_weights"], (~first).float())


def test_every_epoch_reads_every_block_once_in_a_new_order(prepared):
    blocks = _rows(prepared).blocks
    rows = _rows(prepared, num_rows=2 * blocks, seed=3)
    assert rows.epochs == 2
    plain = {tuple(_rows(prepared)[index]["input_ids"].tolist()) for index in range(blocks)}
    read = [tuple(rows[index]["input_ids"].tolist()) for index in range(2 * blocks)]
    assert set(read[:blocks]) == set(read[blocks:]) == plain
    assert read[:blocks] != read[blocks:]


def test_rows_depend_only_on_seed_and_index(prepared):
    blocks = _rows(prepared).blocks
    rows = _rows(prepared, num_rows=3 * blocks, seed=3)
    whole = [rows[index] for index in range(len(rows))]
    other = _rows(prepared, num_rows=blocks + 1, seed=3)
    assert all(_same(other[index], whole[index]) for index in reversed(range(len(other))))
    elsewhere = _rows(prepared, num_rows=blocks, seed=4)
    assert not all(_same(elsewhere[index], whole[index]) for index in range(blocks))


def test_workers_read_equal_rows(prepared):
    rows = _rows(prepared, seed=3, num_rows=24)
    alone, helped = (
        list(DataLoader(rows, batch_size=4, num_workers=workers, collate_fn=collate_rows)) for workers in (0, 2)
    )
    assert len(alone) == 6
    assert all(_same(one, other) for one, other in zip(alone, helped, strict=True))


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"context_length": 1}, "context_length must be at least 2 tokens; it is 1"),
        ({"context_length": 10**6}, "expected at least 1000000"),
        ({"num_rows": 0}, "num_rows must be at least 1; it is 0"),
    ],
)
def test_impossible_rows_are_refused(prepared, options, complaint):
    with pytest.raises(ValueError, match=complaint):
        _rows(prepared, **options)
