"""FASTA files, valid and broken, and the nucleotide tokenizer."""

import bz2
import contextlib
import gzip
import lzma
import random
import struct
import zlib
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from xopen import xopen

from attention_priors.lab.data import load_corpus, token_stream, train_tokenizer
from attention_priors.lab.data.document import Document
from attention_priors.lab.data.genomes import (
    FastaError,
    FastaFile,
    check_nucleotides,
    encode_nucleotides,
    is_fasta,
    is_nucleotide_tokenizer,
    nucleotide_tokenizer,
)
from attention_priors.lab.data.preparation import Preparation, prepare
from attention_priors.lab.data.shards import TokenShards, read_manifest
from attention_priors.lab.data.sources import DataSettings, FastaSettings
from attention_priors.lab.data.tokenizer import load_tokenizer
from attention_priors.lab.tasks import PasskeyTexts, RulerTask


def fasta(path: Path, content: str | bytes) -> Path:
    data = content.encode() if isinstance(content, str) else content
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def contigs(path: Path) -> dict[str, str]:
    return {document.name: document.text for _, document in FastaFile(path).contigs()}


@cache
def drawn(size: int, seed: int = 0) -> str:
    return "".join(random.Random(seed).choices("ACGT", k=size))


@pytest.mark.parametrize("name", ["x.fa", "x.FASTA", "x.fna.gz"])
def test_records_are_read_in_upper_case_line_by_line(tmp_path: Path, name: str):
    path = fasta(tmp_path / name, ">one described\nACGT\nacgtn\n\nRyNNu\n>two\r\nNNACGT\r\nNN\r\n")
    assert is_fasta(path)
    assert contigs(path) == {"one:1-14": "ACGTACGTNNNNNT", "two:1-8": "NNACGTNN"}


def test_gaps_end_contigs_and_short_runs_do_not(tmp_path: Path):
    gap, short = "N" * 5 + "n" * 5, "N" * 9
    path = fasta(tmp_path / "x.fa", f">a\n{gap}ACGT{short}GG\n{gap}NNTT{gap}\n>b\n{short}\n>c\nAC\n")
    assert contigs(path) == {"a:11-25": f"ACGT{short}GG", "a:38-39": "TT", "c:1-2": "AC"}
    summary = FastaFile(path).summary()
    assert (summary.records, summary.contigs, summary.bases, summary.unknown) == (("a", "b", "c"), 3, 19, ("b",))


@given(
    records=st.lists(st.text(alphabet="ACGTNacgtnRYu", min_size=1, max_size=60), min_size=1, max_size=4),
    width=st.integers(1, 70),
)
def test_contigs_are_records_without_gaps(tmp_path_factory: pytest.TempPathFactory, records, width):
    lines = []
    for index, sequence in enumerate(records):
        lines += [f">r{index}", *(sequence[start : start + width] for start in range(0, len(sequence), width))]
    path = fasta(tmp_path_factory.mktemp("drawn") / "x.fa", "\n".join(lines) + "\n")
    folded = {
        f"r{index}": sequence.upper().translate(str.maketrans("URY", "TNN")) for index, sequence in enumerate(records)
    }
    if all(set(sequence) == {"N"} for sequence in folded.values()):
        with pytest.raises(FastaError, match="no record has a known base"):
            contigs(path)
        return
    covered = {name: ["N"] * len(sequence) for name, sequence in folded.items()}
    for region, text in contigs(path).items():
        name, _, span = region.partition(":")
        first, last = map(int, span.split("-"))
        assert text == folded[name][first - 1 : last]
        assert "N" * 10 not in text
        covered[name][first - 1 : last] = text
    assert {name: "".join(letters) for name, letters in covered.items()} == folded


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("", "no records"),
        ("ACGT\n>y\nAC\n", r"cannot be read further at its beginning: .*line 1.*'>'"),
        (">x\nACGT\n>y\n>z\nAC\n", "record 'y' has no sequence"),
        (">x\nACGT\n>\nAC\n", "record number 2 has no name"),
        (">x\nACGT\n>x again\nAC\n", "record 'x' is a duplicate: expected distinct names"),
        (">x\nACGT\n>y\nACGT\nAC*T\n", r"record 'y' has '\*' at base 7 of 8: expected nucleotides"),
        (">x\nAC GT\n", "record 'x' has ' ' at base 3 of 5"),
        (">x\nAC>GT\n", "record 'x' has '>' at base 3 of 5"),
        (">x\nMKVL\n", "record 'x' has 'L' at base 4 of 4"),
        (">x\nNNN\n", "no record has a known base"),
        (">é\nACGT\n", "cannot be read further at its beginning"),
    ],
)
def test_broken_records_are_named(tmp_path: Path, content: str, problem: str):
    path = fasta(tmp_path / "broken.fa", content)
    with pytest.raises(FastaError, match=rf"broken\.fa.*{problem}"):
        next(FastaFile(path).contigs())
    with pytest.raises(ValueError, match=problem):
        load_corpus(path)


@pytest.mark.parametrize("share", [0.3, 0.6, 0.999])
def test_truncated_gzip_files_are_refused(tmp_path: Path, share: float):
    whole = gzip.compress(f">first\nACGT\n>second\n{drawn(100_000)}\n>third\n{drawn(100_000, 1)}\n".encode())
    path = tmp_path / "cut.fa.gz"
    path.write_bytes(whole[: int(share * len(whole))])
    before = "first" if share < 0.5 else "second"
    with pytest.raises(
        FastaError, match=rf"cut\.fa\.gz cannot be read further after record '{before}': .*ended before"
    ):
        next(FastaFile(path).contigs())


@pytest.mark.parametrize("share", [0.02, 0.3, 0.5, 0.7, 0.99])
@pytest.mark.parametrize("bases", [3_000, 100_000])
def test_damaged_gzip_files_are_refused(bases: int, share: float, tmp_path: Path):
    whole = bytearray(gzip.compress(f">first\n{drawn(bases)}\n".encode()))
    whole[max(20, int(share * len(whole)))] ^= 0xFF
    path = tmp_path / "damaged.fa.gz"
    path.write_bytes(bytes(whole))
    with pytest.raises(FastaError, match="damaged"):
        FastaFile(path).summary()


@pytest.mark.parametrize("place", [8, 0.3, 0.6])
@pytest.mark.parametrize("ending", ["bz2", "xz", "zst"])
def test_damaged_files_of_other_compressions_are_refused(place: float, ending: str, tmp_path: Path):
    path = tmp_path / f"damaged.fa.{ending}"
    with xopen(path, "wb") as file:
        file.write(f">first\n{drawn(100_000)}\n".encode())
    whole = bytearray(path.read_bytes())
    start = place if isinstance(place, int) else int(place * len(whole))
    whole[start : start + 4] = bytes(255 - byte for byte in whole[start : start + 4])
    path.write_bytes(bytes(whole))
    with pytest.raises(FastaError, match=r"damaged\.fa"):
        FastaFile(path).summary()


BGZF_END = bytes.fromhex("1f8b08040000000000ff0600424302001b0003000000000000000000")


def bgzf(text: str, fields: bytes = b"") -> list[bytes]:
    """Return all blocks that bgzip writes except the last. Each is a gzip member whose header states its length.

    ``fields`` are other extra fields of the header, before the length.
    """
    blocks = []
    for start in range(0, len(text), 20_000):
        part = text[start : start + 20_000].encode()
        packer = zlib.compressobj(wbits=-15)
        packed = packer.compress(part) + packer.flush()
        head = b"\x1f\x8b\x08\x04" + bytes(5) + b"\xff" + struct.pack("<H", len(fields) + 6) + fields
        length = len(head) + 6 + len(packed) + 8
        blocks.append(
            head + b"BC" + struct.pack("<HH", 2, length - 1) + packed + struct.pack("<II", zlib.crc32(part), len(part))
        )
    return blocks


@pytest.mark.parametrize("fields", [b"", b"XY\x03\x00BCD"], ids=["bgzip's", "and another field"])
def test_bgzf_files_cut_between_blocks_are_refused(fields: bytes, tmp_path: Path):
    text = f">first\n{drawn(50_000)}\n>second\n{drawn(30_000, 1)}\n"
    blocks = bgzf(text, fields)
    path = tmp_path / "blocks.fa.gz"
    path.write_bytes(b"".join([*blocks, BGZF_END]))
    assert gzip.decompress(path.read_bytes()).decode() == text
    assert FastaFile(path).summary().bases == 80_000
    assert len(blocks) == 5
    for number in range(1, 6):
        path.write_bytes(b"".join(blocks[:number]))
        with pytest.raises(FastaError, match=r"blocks\.fa\.gz is truncated: it is a BGZF file without"):
            next(FastaFile(path).contigs())
    # Two whole files joined are valid, with an end in the middle.
    path.write_bytes(b"".join([*blocks, BGZF_END, *bgzf(">third\nACGT\n"), BGZF_END]))
    assert FastaFile(path).summary().records == ("first", "second", "third")


MANY_STREAMS = [f">r{number}\n{drawn(200, number)}\n" for number in range(4)]


@pytest.mark.parametrize(("ending", "compress"), [("bz2", bz2.compress), ("xz", lzma.compress)])
def test_concatenated_streams_are_read_and_each_must_be_whole(ending: str, compress, tmp_path: Path):
    streams = [compress(record.encode()) for record in MANY_STREAMS]
    path = tmp_path / f"x.fa.{ending}"
    path.write_bytes(b"".join(streams))
    whole = contigs(path)
    assert [*whole] == [f"r{number}:1-200" for number in range(4)]
    generator = random.Random(0)
    for _ in range(30):
        damaged = bytearray(b"".join(streams))
        place = generator.randrange(len(damaged))
        damaged[place] ^= 1 << generator.randrange(8)
        path.write_bytes(damaged)
        with contextlib.suppress(FastaError):
            assert contigs(path) == whole  # bytes without a checksum, such as the padding of xz
    path.write_bytes(b"".join(streams) + b"rubbish")
    with pytest.raises(FastaError, match=r"cannot be read further after record 'r[23]'"):
        contigs(path)


def test_streams_of_xz_may_have_zeros_between_them(tmp_path: Path):
    streams = [lzma.compress(record.encode()) for record in MANY_STREAMS]
    path = tmp_path / "x.fa.xz"
    path.write_bytes((b"\0" * 8).join(streams) + b"\0" * 200_000)
    assert [*contigs(path)] == [f"r{number}:1-200" for number in range(4)]


def test_files_that_change_during_reading_are_refused(tmp_path: Path):
    content = "".join(f">r{number}\n{drawn(50_000, number)}\n" for number in range(6))
    path = fasta(tmp_path / "x.fa", content)
    genome = FastaFile(path)
    genome.summary()
    fasta(path, content[: len(content) // 2])
    with pytest.raises(FastaError, match="has changed while it was being read"):
        list(genome.contigs())


def test_concatenated_gzip_files_are_one_file(tmp_path: Path):
    path = tmp_path / "both.fa.gz"
    path.write_bytes(gzip.compress(b">a\nAC") + gzip.compress(b"GT\n>b\nTT\n"))
    assert contigs(path) == {"a:1-4": "ACGT", "b:1-2": "TT"}


def test_missing_files_are_refused_at_once(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        FastaFile(tmp_path / "nowhere.fa")


# ---- as a corpus


def test_a_genome_is_a_corpus_of_its_contigs(tmp_path: Path):
    records = {f"chr{index}": drawn(300, index) for index in range(12)}
    path = fasta(tmp_path / "genome.fa.gz", "".join(f">{name}\n{text}\n" for name, text in records.items()))
    corpus = load_corpus(path)
    assert {d.name: d.text for d in corpus.train + corpus.held_out} == {
        f"{name}:1-300": text for name, text in records.items()
    }
    assert corpus.held_out
    one = fasta(tmp_path / "one.fa", f">chr\n{drawn(5000)}\n>unknown\nNNN\n")
    corpus = load_corpus(one)
    assert [len(d.text) for d in corpus.train + corpus.held_out] == [4500, 500]
    assert corpus.skipped == ("unknown: none of its bases is known",)


def test_a_file_of_a_package_is_a_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "genomes_of_mine" / "inner").mkdir(parents=True)
    (tmp_path / "genomes_of_mine" / "__init__.py").touch()
    fasta(tmp_path / "genomes_of_mine" / "inner" / "x.fa", f">x\n{drawn(2000)}\n")
    monkeypatch.syspath_prepend(tmp_path)
    corpus = load_corpus("package:genomes_of_mine/inner/x.fa")
    assert corpus.name == "package:genomes_of_mine/inner/x.fa"
    assert [len(d.text) for d in corpus.train + corpus.held_out] == [1800, 200]
    with pytest.raises(FileNotFoundError, match=r"the package 'genomes_of_mine' has no 'other\.fa'"):
        load_corpus("package:genomes_of_mine/other.fa")


# ---- tokens


def test_every_base_is_a_token(tmp_path: Path):
    tokenizer = load_tokenizer("nucleotides", None, tmp_path)  # pyright: ignore[reportArgumentType]
    assert tokenizer("ACGTN", add_special_tokens=True).input_ids == [1, 2, 3, 4, 5]
    assert tokenizer.decode([1, 2, 3, 4, 5]) == "ACGTN"
    assert (tokenizer.eos_token_id, len(tokenizer)) == (0, 6)
    tokenizer.save_pretrained(tmp_path)
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert is_nucleotide_tokenizer(loaded)
    assert loaded("acgtuU").input_ids == [1, 2, 3, 4, 4, 4]
    loaded.padding_side = "left"
    assert loaded(["A", "ACG"], padding=True).input_ids == [[0, 0, 1], [1, 2, 3]]
    assert is_nucleotide_tokenizer(loaded)
    assert not is_nucleotide_tokenizer(train_tokenizer([Document("x", "ab " * 200)], 257))


@given(st.text(alphabet=st.one_of(st.sampled_from("ACGTUNacgtun\n *5é"), st.characters(codec="utf-8")), max_size=40))
def test_fast_encoding_matches_the_tokenizer(text: str):
    (fast,) = encode_nucleotides([text])
    assert fast.tolist() == nucleotide_tokenizer()(text, add_special_tokens=False).input_ids


def test_token_streams_separate_contigs():
    stream = token_stream(nucleotide_tokenizer(), [Document("a", "ACG"), Document("b", "TN")])
    assert stream.tokens.tolist() == [1, 2, 3, 0, 4, 5, 0]
    assert stream.document_ids.tolist() == [0, 0, 0, 0, 1, 1, 1]


def test_nucleotide_tokenizers_refuse_pass_keys_and_needles():
    with pytest.raises(ValueError, match="cannot write '12345': its tokens decode to 'NNNNN'"):
        PasskeyTexts(nucleotide_tokenizer(), None)
    with pytest.raises(ValueError, match="cannot write 'What is the special magic number"):
        RulerTask(nucleotide_tokenizer(), "niah_single_1")


# ---- preparation, as in `attention-priors train`


def _preparation(path: Path, **changes) -> Preparation:
    settings = {"held_out_tokens": 100, "max_tokens": None, "shard_tokens": 150}
    settings |= {name: changes.pop(name) for name in list(changes) if name in settings}
    return Preparation(
        FastaSettings(path=str(path), **changes),
        tokenizer="nucleotides",
        held_out_tokens=settings["held_out_tokens"],
        max_tokens=settings["max_tokens"],
        shard_tokens=settings["shard_tokens"],
    )


def _text(folder: Path, part: str) -> str:
    tokens = TokenShards(folder, part)
    return str(nucleotide_tokenizer().decode(tokens.window(0, len(tokens))[0]))


@pytest.fixture
def genome(tmp_path: Path) -> tuple[Path, dict[str, str]]:
    records = {f"chr{index}": drawn(100 + index, index) for index in range(6)}
    return fasta(tmp_path / "g.fa.gz", "".join(f">{name}\n{text}\n" for name, text in records.items())), records


def test_named_records_are_held_out(tmp_path: Path, genome):
    path, records = genome
    prepare(_preparation(path, held_out=("chr4", "chr1")), tmp_path / "shards")
    end = "<|endoftext|>"
    assert _text(tmp_path / "shards", "held_out") == records["chr1"] + end + records["chr4"] + end
    rest = [text for name, text in records.items() if name not in ("chr1", "chr4")]
    assert _text(tmp_path / "shards", "train") == "".join(text + end for text in rest)
    assert len(read_manifest(tmp_path / "shards")["parts"]["train"]) > 1


def test_by_default_the_first_contigs_are_held_out(tmp_path: Path, genome):
    path, records = genome
    prepare(_preparation(path), tmp_path / "shards")
    assert _text(tmp_path / "shards", "held_out") == records["chr0"] + "<|endoftext|>"
    assert _text(tmp_path / "shards", "train").startswith(records["chr1"])


def test_an_interrupted_preparation_resumes(tmp_path: Path, genome):
    path, _ = genome
    prepare(_preparation(path), tmp_path / "whole")

    def interrupt(part: str, tokens: int) -> None:
        if part == "train" and tokens > 200:
            raise KeyboardInterrupt

    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            prepare(_preparation(path), tmp_path / "parts", on_tokens=interrupt)
    prepare(_preparation(path), tmp_path / "parts")
    for part in ("held_out", "train"):
        assert _text(tmp_path / "parts", part) == _text(tmp_path / "whole", part)


def test_broken_genomes_are_not_prepared(tmp_path: Path):
    path = fasta(tmp_path / "broken.fa", f">good\n{drawn(500)}\n>bad\nAC-GT\n")
    with pytest.raises(FastaError, match="record 'bad' has '-'"):
        prepare(_preparation(path), tmp_path / "shards")
    assert not (tmp_path / "shards").exists()


def test_held_out_records_must_exist(tmp_path: Path, genome):
    path, _ = genome
    for held_out, problem in (
        (("chrX",), r"has no record 'chrX' with a known base; it has chr0, chr1"),
        (("chr2", "chr?"), "are held out; leave at least one to train on"),
    ):
        with pytest.raises(ValueError, match=rf"data\.fasta\.held_out: .*{problem}"):
            prepare(_preparation(path, held_out=held_out), tmp_path / "shards")
        assert not (tmp_path / "shards").exists()
    unknown = fasta(tmp_path / "unknown.fa", ">a\nACGT\n>b\nNNN\n")
    with pytest.raises(ValueError, match="no record 'b' with a known base; it has a"):
        prepare(_preparation(unknown, held_out=("b",)), tmp_path / "shards")


def test_names_may_look_like_patterns(tmp_path: Path):
    path = fasta(tmp_path / "x.fa", f">seq[1]\n{drawn(900)}\n>b\n{drawn(900, 1)}\n")
    prepare(_preparation(path, held_out=("seq[1]",)), tmp_path / "shards")
    assert _text(tmp_path / "shards", "held_out") == drawn(900) + "<|endoftext|>"


def test_records_that_match_a_pattern_are_held_out(tmp_path: Path):
    path = fasta(tmp_path / "x.fa", ">chr1\nAC\n>chr2_alt\nCC\n>chr2\nGG\n")
    prepare(_preparation(path, held_out=("chr2*",)), tmp_path / "shards")
    end = "<|endoftext|>"
    assert _text(tmp_path / "shards", "held_out") == f"CC{end}GG{end}"
    assert _text(tmp_path / "shards", "train") == f"AC{end}"


def test_reusing_tokens_needs_only_the_files_hash(tmp_path: Path, genome, monkeypatch: pytest.MonkeyPatch):
    path, _ = genome
    prepare(_preparation(path), tmp_path / "shards")
    monkeypatch.setattr(FastaFile, "summary", lambda self: pytest.fail("it was read again"))
    prepare(_preparation(path), tmp_path / "shards")


def test_files_of_a_folder_are_read_by_type(tmp_path: Path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    fasta(folder / "b.fa.gz", f">one\n{drawn(600)}\n>two\n{drawn(600, 1)}\n")
    (folder / "a.txt").write_text("some words")
    corpus = load_corpus(folder)
    found = {document.name: document.text for document in corpus.train + corpus.held_out}
    assert found == {"a.txt": "some words", "b.fa.gz/one:1-600": drawn(600), "b.fa.gz/two:1-600": drawn(600, 1)}
    fasta(folder / "c.fa", ">bad\nA-C\n")
    with pytest.raises(FastaError, match="record 'bad'"):
        load_corpus(folder)


@pytest.mark.parametrize("compress", [bz2.compress, lzma.compress])
def test_other_compressions_are_read(tmp_path: Path, compress):
    path = tmp_path / f"x.fa.{'bz2' if compress is bz2.compress else 'xz'}"
    path.write_bytes(compress(b">x\nACGT\n"))
    assert is_fasta(path)
    assert contigs(path) == {"x:1-4": "ACGT"}


def test_large_tokenizers_are_recognised_without_serialisation(monkeypatch: pytest.MonkeyPatch):
    large = train_tokenizer([Document("x", "ab " * 200)], 257)
    monkeypatch.setattr("attention_priors.lab.data.genomes._meaning", lambda tokenizer: pytest.fail("written down"))
    assert not is_nucleotide_tokenizer(large)


def test_skipped_records_of_a_folder_are_listed(tmp_path: Path):
    fasta(tmp_path / "x.fa", f">a\n{drawn(3000)}\n>b\nNNNNNNNNNNNN\n")
    assert load_corpus(tmp_path).skipped == ("x.fa/b: none of its bases is known",)


def test_lines_of_bases_are_not_text():
    with pytest.raises(ValueError, match="the text holds line ends, which would be read as N"):
        check_nucleotides("ACGT\nACGT\n")
    check_nucleotides("ACGTACGT\n")


def test_data_settings_accept_one_source():
    assert DataSettings.model_validate({"fasta": {"path": "x.fa"}}).fasta is not None
    with pytest.raises(ValueError, match="got text and fasta"):
        DataSettings.model_validate({"fasta": {"path": "x.fa"}, "text": "embedded"})


def test_tokens_of_bases_take_one_byte():
    (tokens,) = encode_nucleotides([drawn(10_000)])
    assert tokens.dtype == np.uint8
