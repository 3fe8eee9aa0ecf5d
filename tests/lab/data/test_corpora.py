import os
import re
from pathlib import Path

import pytest

from attention_priors.lab.data import Corpus, Document, load_corpus
from attention_priors.lab.data.corpora import left_out, read_documents


def _size(documents: tuple[Document, ...]) -> int:
    return sum(len(document.text) for document in documents)


def _names(documents: tuple[Document, ...]) -> list[str]:
    return [document.name for document in documents]


def _write(folder: Path, count: int) -> None:
    for index in range(count):
        (folder / f"{index:03}.txt").write_text(f"document {index}\n" * 10)


@pytest.fixture(scope="module")
def embedded() -> Corpus:
    return load_corpus("embedded")


def test_embedded_corpus_is_equal_on_every_load(embedded: Corpus):
    again = load_corpus("embedded")

    assert again == embedded
    assert again.fingerprint == embedded.fingerprint


def test_embedded_corpus_is_large_and_holds_out_5_percent(embedded: Corpus):
    count = len(embedded.train) + len(embedded.held_out)

    assert _size(embedded.train) > 5_000_000
    assert 0.025 < len(embedded.held_out) / count < 0.1


def test_embedded_corpus_has_code_and_prose_only(embedded: Corpus):
    names = _names(embedded.train) + _names(embedded.held_out)

    assert "json/decoder.py" in names
    assert any(name.startswith("pydoc_data.topics/") for name in names)
    folders = {folder for name in names for folder in name.split("/")[:-1]}
    assert not folders & {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    assert not [name for name in names if name.startswith("_sysconfigdata")]


def test_no_held_out_text_is_in_the_training_part(embedded: Corpus):
    assert not {document.text for document in embedded.train} & {document.text for document in embedded.held_out}


def test_max_characters_cuts_only_the_training_part(embedded: Corpus):
    part = load_corpus("embedded", max_characters=1_000_000)

    assert _size(part.train) == 1_000_000
    assert part.held_out == embedded.held_out
    whole = set(embedded.train)
    assert sum(document not in whole for document in part.train) <= 1  # the last document is cut
    initials = {name[0].lower() for name in _names(part.train)}
    assert {"a", "u"} <= initials  # from the whole corpus, not the first names of the alphabet


def test_max_characters_above_the_size_keeps_everything(embedded: Corpus):
    assert load_corpus("embedded", max_characters=10**9) == embedded


@pytest.mark.parametrize("max_characters", [0, -5])
def test_max_characters_below_one_is_refused(max_characters: int):
    with pytest.raises(ValueError, match=f"max_characters must be at least 1.*{max_characters}"):
        load_corpus("embedded", max_characters=max_characters)


def test_folders_are_read_recursively_in_order_without_hidden_files(tmp_path: Path):
    _write(tmp_path, 40)
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "deep" / "er" / "leaf.md").write_text("leaf")
    (tmp_path / ".hidden").write_text("hidden")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("hidden too")

    corpus = load_corpus(tmp_path)

    names = _names(corpus.train) + _names(corpus.held_out)
    assert set(names) == {*(f"{index:03}.txt" for index in range(40)), "deep/er/leaf.md"}
    assert _names(corpus.train) == sorted(_names(corpus.train))
    assert corpus.name == tmp_path.name


def test_skipped_files_of_a_folder_are_listed(tmp_path: Path):
    _write(tmp_path, 3)
    (tmp_path / "nul.bin").write_bytes(b"a\0b")
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1"))
    (tmp_path / "void.txt").write_text(" \n")
    (tmp_path / "zcopy.txt").write_text((tmp_path / "001.txt").read_text())

    corpus = load_corpus(tmp_path)

    assert len(corpus.train) + len(corpus.held_out) == 3
    assert sorted(line.split(":")[0] for line in corpus.skipped) == [
        "latin.txt",
        "nul.bin",
        "void.txt",
        "zcopy.txt",
    ]
    assert "zcopy.txt: it is a copy of 001.txt" in corpus.skipped


def test_folders_without_text_raise_an_error_that_lists_skipped_files(tmp_path: Path):
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0")

    with pytest.raises(ValueError, match=r"holds no text file.*picture\.png.*binary"):
        load_corpus(tmp_path)


@pytest.mark.parametrize("count", [2, 3, 10])
def test_small_folders_still_have_both_parts(tmp_path: Path, count: int):
    _write(tmp_path, count)

    corpus = load_corpus(tmp_path)

    assert len(corpus.train) >= 1
    assert len(corpus.held_out) >= 1
    assert len(corpus.train) + len(corpus.held_out) == count


@pytest.mark.parametrize("position", range(6))
def test_held_out_parts_are_balanced(tmp_path: Path, position: int):
    # The large document may have any of six names. Examples: a genome with its plasmids, a training text beside its
    # test text.
    for index in range(6):
        size = 3000 if index == position else 10
        (tmp_path / f"{index}.txt").write_text("".join(f"line {index} {line}\n" for line in range(size)))
    corpus = load_corpus(tmp_path)
    (held_out,) = corpus.held_out
    train, held = sum(len(document.text) for document in corpus.train), len(held_out.text)
    assert 0.09 < held / (train + held) < 0.11
    assert held_out.name.startswith(f"{position}.txt[")
    assert f"line {position} 2999\n" in held_out.text
    assert len(corpus.train) == 6


def test_a_document_that_fits_is_held_out_whole(tmp_path: Path):
    sizes = {"train.txt": 900, "valid.txt": 40, "test.txt": 60}
    for name, size in sizes.items():
        (tmp_path / name).write_text(f"a line of {name}\n" * size)
    (held_out,) = load_corpus(tmp_path).held_out
    assert held_out.name in ("valid.txt", "test.txt")


def test_file_names_outside_utf8_are_escaped(tmp_path: Path):
    _write(tmp_path, 3)
    try:
        (tmp_path / os.fsdecode(b"caf\xe9.txt")).write_text("un mot\n" * 10)
    except OSError:
        pytest.skip("this file system takes names in UTF-8 alone")
    corpus = load_corpus(tmp_path)
    assert r"caf\xe9.txt" in _names(corpus.train + corpus.held_out)
    assert corpus.fingerprint


def test_messages_about_skipped_files():
    lines = [f"{name}: it is empty or blank" for name in "abcd"]
    assert left_out("texts", ()) is None
    assert left_out("texts", lines[:1]) == "left out: a: it is empty or blank"
    assert left_out("texts", lines) == f"left out: {'; '.join(lines[:3])}; and 1 more"
    assert left_out("embedded", lines) is left_out("package:scipy", lines) is None


def test_splits_of_many_documents_depend_only_on_names(tmp_path: Path):
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        _write(tmp_path / folder, 60)
    for path in (tmp_path / "two").iterdir():
        path.write_text(path.read_text() + "and more\n")

    one, two = load_corpus(tmp_path / "one"), load_corpus(tmp_path / "two")

    assert _names(one.held_out) == _names(two.held_out)
    assert one.fingerprint != two.fingerprint


def test_files_are_grouped_by_paragraphs_without_loss(tmp_path: Path):
    text = "\n\n".join(f"paragraph {index} " + "word " * 100 for index in range(100))
    path = tmp_path / "book.txt"
    path.write_text(text)

    corpus = load_corpus(str(path))

    def start(document: Document) -> int:
        return int(document.name.split("[")[1].split(":")[0])

    pieces = sorted(corpus.train + corpus.held_out, key=start)
    assert "".join(piece.text for piece in pieces) == text
    assert all(len(piece.text) >= 2000 for piece in pieces)
    assert all(piece.text.startswith("paragraph") for piece in pieces)
    assert corpus.held_out


def test_a_file_without_held_out_part_is_one_document(tmp_path: Path):
    text = "\n\n".join("word " * 300 for _ in range(10))
    (tmp_path / "book.txt").write_text(text)
    name, documents, skipped = read_documents(tmp_path / "book.txt")
    assert (name, documents, skipped) == ("book.txt", (Document("book.txt", text),), ())
    corpus = load_corpus(tmp_path / "book.txt")
    copies = [line for line in corpus.skipped if "it is a copy of" in line]
    assert len(copies) == 3  # of five pairs of paragraphs; the last pair does not end in a blank line


def test_an_empty_name_is_refused():
    with pytest.raises(FileNotFoundError, match="source '' does not exist"):
        load_corpus("")


def test_single_document_is_cut_at_a_line_end_near_nine_tenths(tmp_path: Path):
    path = tmp_path / "lines.txt"
    path.write_text("0123456789 line\n" * 100)

    corpus = load_corpus(path)

    (train,), (held_out,) = corpus.train, corpus.held_out
    assert train.text + held_out.text == path.read_text()
    assert train.text.endswith("\n")
    assert 0.88 < len(train.text) / 1600 < 0.92


def test_a_file_of_one_line_is_cut_at_nine_tenths(tmp_path: Path):
    path = tmp_path / "line.txt"
    path.write_text("x" * 2000)
    corpus = load_corpus(path)
    assert [len(document.text) for document in corpus.train + corpus.held_out] == [1800, 200]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "empty"),
        (b" \n\n ", "empty or blank"),
        (b"abc\0def", "NUL"),
        (b"ab\xff", r"not UTF-8 \(byte 2\)"),
        (b"short\n", "too short to split.*1000"),
    ],
)
def test_unusable_files_are_named(tmp_path: Path, content: bytes, problem: str):
    path = tmp_path / "input.txt"
    path.write_bytes(content)

    with pytest.raises(ValueError, match=rf"input\.txt.*{problem}"):
        load_corpus(path)


def test_missing_sources_are_named(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        load_corpus(tmp_path / "nowhere")


def test_fingerprints_depend_on_names_texts_and_parts():
    one, two = Document("a", "bc"), Document("ab", "c")

    fingerprints = {
        Corpus("x", (one,), (two,)).fingerprint,
        Corpus("x", (two,), (one,)).fingerprint,
        Corpus("x", (one, two), ()).fingerprint,
        Corpus("x", (one,), ()).fingerprint,
        Corpus("x", (two,), ()).fingerprint,
    }

    assert len(fingerprints) == 5
    assert Corpus("x", (one,), (two,)).fingerprint == Corpus("y", (one,), (two,)).fingerprint


def test_an_installed_package_is_a_folder_of_text():
    corpus = load_corpus("package:scipy", max_characters=100_000)

    assert corpus.name == "package:scipy"
    assert _size(corpus.train) == 100_000
    assert any(name.endswith("__init__.py") for name in _names(corpus.held_out))
    assert not any("__pycache__" in name for name in _names(corpus.held_out))


@pytest.mark.parametrize("name", ["no_such_package", "scipy.stats", "timeit", "", "../x"])
def test_missing_packages_are_named(name: str):
    """`timeit` is a module without a folder."""
    with pytest.raises(FileNotFoundError, match=f"package:{re.escape(name)}'.*installed Python package"):
        load_corpus(f"package:{name}")
