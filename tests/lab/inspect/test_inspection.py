"""``attention-priors inspect``: models of all kinds, measured numbers, the page, errors."""

import base64
import copy
import itertools
import json
import math
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertModel,
    BloomConfig,
    GPT2Config,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from typer.testing import CliRunner

from attention_priors.hf import attach
from attention_priors.lab.cli import app
from attention_priors.lab.data import load_corpus, train_tokenizer
from attention_priors.lab.inspect import (
    InspectionPlan,
    curve_distances,
    first_layer_linear_audit,
    inspect_model,
    load_inspected,
    text_to_read,
)
from attention_priors.lab.inspect.inspection import _tokens, figure_4_prompt
from attention_priors.lab.inspect.priors import REACH_LENGTHS
from attention_priors.lab.report import inspection_summary, write_inspection
from attention_priors.lab.report.figures.attention import attention_map
from attention_priors.lab.report.figures.heads import prior_curves
from attention_priors.lab.report.figures.style import png
from attention_priors.lab.report.pages.inspection import inspection_results, inspection_tables
from attention_priors.lab.strict_yaml import validated
from attention_priors.lab.tasks.passkey import PasskeyTexts
from attention_priors.models import (
    PriorDecoderConfig,
    PriorDecoderForCausalLM,
    PriorEncoderConfig,
    PriorEncoderForMaskedLM,
    PriorVisionConfig,
    PriorVisionForImageClassification,
)
from browsing import Opened, in_a_browser
from html_pages import Page
from thoroughness import every_other_deep

VOCABULARY = 300
TEXT = "def first(second):\n    return second + 1\n" * 20
SMALL: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 24, "num_attention_heads": 4}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(load_corpus("embedded", max_characters=50_000).train, VOCABULARY)


def ours() -> Any:
    config = PriorDecoderConfig(
        **SMALL, intermediate_size=32, num_hidden_layers=2, logit_scale="ssmax",
        prior={"name": "generalized_gaussian", "init": "neighbours", "keep_sign": True},
    )  # fmt: skip
    return PriorDecoderForCausalLM(config)


def goat_on_llama() -> Any:
    config = LlamaConfig(**SMALL, intermediate_size=32, num_hidden_layers=2, num_key_value_heads=2)
    return attach(
        AutoModelForCausalLM.from_config(config), [{"name": "spectral"}, {"name": "key_sink", "train_length": 64}]
    )


def on_some_heads() -> Any:
    config = LlamaConfig(**SMALL, intermediate_size=32, num_hidden_layers=2, num_key_value_heads=2)
    prior = {"name": "generalized_gaussian", "init": {"beta": [1.0, -0.5], "theta_alpha": [-1.0, 0.5]}}
    return attach(AutoModelForCausalLM.from_config(config), prior, logit_scale="ssmax", heads=[2, 3])


def scale_on_some_heads() -> Any:
    config = GPT2Config(vocab_size=VOCABULARY, n_embd=24, n_layer=2, n_head=4, n_positions=1024)
    model: Any = AutoModelForCausalLM.from_config(config)
    return attach(model, logit_scale="ssmax", heads=[2, 3], drop_positions=True)


def linear() -> Any:
    config = PriorDecoderConfig(
        **SMALL, intermediate_size=32, num_hidden_layers=2, encoding="linear", initializer_range=0.3
    )
    return PriorDecoderForCausalLM(config)


def encoder(**positions: Any) -> Any:
    config = PriorEncoderConfig(**SMALL, intermediate_size=32, num_hidden_layers=2, initializer_range=0.3, **positions)
    return PriorEncoderForMaskedLM(config)


GAUSSIANS = {"name": "generalized_gaussian", "init": {"theta_alpha": -2.0, "beta": [1.0, 1.0, 1.0, -0.5]}}

MODELS = {
    "ours": ours,
    "linear": linear,
    "an encoder": lambda: encoder(prior=GAUSSIANS, logit_scale="ssmax"),
    "a linear encoder": lambda: encoder(encoding="linear"),
    "some heads": on_some_heads,
    "a scale on some heads": scale_on_some_heads,
    "GPT-2": lambda: AutoModelForCausalLM.from_config(
        GPT2Config(vocab_size=VOCABULARY, n_embd=24, n_layer=2, n_head=4, n_positions=1024)
    ),
    "short GPT-2": lambda: AutoModelForCausalLM.from_config(
        GPT2Config(vocab_size=VOCABULARY, n_embd=24, n_layer=2, n_head=4, n_positions=128)
    ),
    "BLOOM": lambda: AutoModelForCausalLM.from_config(
        BloomConfig(vocab_size=VOCABULARY, hidden_size=24, n_layer=2, n_head=4)
    ),
    "T5": lambda: T5ForConditionalGeneration(
        T5Config(vocab_size=VOCABULARY, d_model=24, d_kv=6, d_ff=32, num_layers=2, num_heads=4)
    ),
    "goat on Llama": goat_on_llama,
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for name, make in MODELS.items():
        torch.manual_seed(0)
        made[name] = tmp_path_factory.mktemp("models") / name.replace(" ", "-")
        make().save_pretrained(made[name])
        tokenizer.save_pretrained(made[name])
    return made


@pytest.fixture(scope="module", autouse=True)
def _short_reach() -> Iterator[None]:
    """Measure the reach in short texts only. A million tokens would take half of an inspection."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("attention_priors.lab.inspect.inspection.REACH_LENGTHS", (1024, 4096))
        yield


@pytest.fixture(scope="module")
def findings(folders: dict[str, Path]) -> dict[str, dict[str, Any]]:
    plan = InspectionPlan(length=512, text=TEXT, text_name="a text", text_tokens=96)
    return {name: inspect_model(load_inspected(folder), plan) for name, folder in folders.items()}


@pytest.fixture(scope="module")
def page_of(findings: dict[str, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Write the page of each model once, and return it."""

    @cache
    def write(name: str) -> str:
        page = tmp_path_factory.mktemp("page") / "page.html"
        write_inspection(findings[name], page)
        return page.read_text(encoding="utf-8")

    return write


@pytest.mark.parametrize("name", MODELS)
def test_every_head_of_every_layer_is_described(name: str, findings: dict[str, dict[str, Any]]) -> None:
    found = findings[name]
    layers = 4 if name == "T5" else 2
    heads = [(layer, head) for layer in range(layers) for head in range(4)]
    assert [(row["layer"], row["head"]) for row in found["priors"]] == heads
    if name == "short GPT-2":
        assert "a table of 128 positions" in found["passkey"]["reason"]
    assert [(row["layer"], row["head"]) for row in found["text"]["heads"]] == heads
    assert found["text"]["tokens"] == 96
    directions = {"T5": [False, False, True, True], "an encoder": [False] * 2, "a linear encoder": [False] * 2}
    assert [layer["causal"] for layer in found["layers"]] == directions.get(name, [True] * 2)
    assert all(("log_prior_ahead" in row) is not found["layers"][row["layer"]]["causal"] for row in found["priors"])
    for row in found["priors"]:
        assert [*row["reach"]] == ["1024", "4096"]
        for reach in row["reach"].values():
            assert reach == sorted(reach)
    numbers = {key: value for key, value in found.items() if key != "passkey"}
    json.dumps(numbers, allow_nan=False)


def test_heads_have_roles(findings: dict[str, dict[str, Any]]) -> None:
    found = findings["ours"]
    assert [row["role"] for row in found["priors"]] == ["retrieval", "retrieval", "local", "local"] * 2
    assert [row["s"] for row in found["logit_scales"]] == pytest.approx([0.43] * 8, abs=0.6)
    for row in found["text"]["heads"]:  # SSMax starts at s = 1; the first query sees no other key
        assert row["inverse_temperature"] == pytest.approx(sum(math.log(n) for n in range(2, 97)) / 95)
    assert found["positions"] == "none"
    assert "8 heads in 2 layers: 4 retrieval and 4 local, for texts of 512 tokens" in inspection_summary(found)


def test_reach_and_roles_describe_the_applied_prior(
    findings: dict[str, dict[str, Any]], folders: dict[str, Path]
) -> None:
    """The curve shows the prior as learned, without the scale."""
    model: Any = PriorDecoderForCausalLM.from_pretrained(folders["ours"]).eval()
    attention = model.model.layers[1].self_attn
    places = torch.arange(1024)
    log_prior = attention.prior.log_prior(places[-1:], places, torch.float64)[:, 0].detach()
    applied = (math.log(1024) * log_prior).softmax(-1)  # SSMax starts at s = 1
    differ = 0
    for row, curve, weights in zip(findings["ours"]["priors"][4:], log_prior, applied, strict=True):
        for reach, share in zip(row["reach"]["1024"], (0.5, 0.9, 0.99), strict=True):
            nearest = weights.flip(0).cumsum(0)
            assert reach == int((nearest < share).sum())
            differ += reach != int((curve.softmax(0).flip(0).cumsum(0) < share).sum())
        assert row["log_prior"][:17] == pytest.approx(curve.flip(0)[:17].tolist(), rel=1e-9)
    assert differ > 2
    assert all(layer["scales_prior"] for layer in findings["ours"]["layers"])
    assert not any(layer["scales_prior"] for layer in findings["goat on Llama"]["layers"])


def test_the_table_of_heads_shows_the_reach_at_its_stated_length(
    findings: dict[str, dict[str, Any]],
) -> None:
    found = findings["some heads"]
    table = inspection_tables(found)["heads"]
    assert "for the last query of 512 tokens" in table.caption
    column = table.header.index("90 % within, tokens")
    shown = [line[column] for line in table.lines]
    assert shown == [str(row["reach_at_length"][1]) for row in found["priors"]]
    assert [row["reach_at_length"] for row in found["priors"] if row["role"] == "uniform"] == [[255, 460, 506]] * 4


def test_heads_without_attached_parts_are_uniform(findings: dict[str, dict[str, Any]]) -> None:
    found = findings["some heads"]
    for row in found["priors"]:
        has = row["head"] in (2, 3)
        assert (row["parameters"]["beta"] is not None) == (row["parameters"]["theta_alpha"] is not None) == has
        assert (row["role"] == "uniform") == (not has)
    assert [row["parameters"]["theta_alpha"] for row in found["priors"][2:4]] == [-1.0, 0.5]
    for name in ("some heads", "a scale on some heads"):
        places = [(row["layer"], row["head"]) for row in findings[name]["logit_scales"]]
        assert places == [(0, 2), (0, 3), (1, 2), (1, 3)]
        for row in findings[name]["text"]["heads"]:
            assert (row["inverse_temperature"] == 1) == (row["head"] < 2)


def test_dropped_positions_are_reported(findings: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    assert findings["a scale on some heads"]["positions"] == "a learned table, dropped in all layers"
    assert findings["some heads"]["positions"] == "rotary"
    llama = LlamaConfig(**SMALL, intermediate_size=32, num_hidden_layers=2)
    for layers, words in ((None, "rotary, dropped in all layers"), ([1], "rotary, dropped in 1 of 2 layers")):
        model: Any = AutoModelForCausalLM.from_config(llama)
        attach(model, "laplace", drop_positions=True, layers=layers).save_pretrained(tmp_path / words)
        assert load_inspected(tmp_path / words).positions() == words


def test_bloom_has_its_published_biases(findings: dict[str, dict[str, Any]]) -> None:
    alibi = build_alibi_tensor(torch.ones(1, 512, dtype=torch.long), 4, torch.float32)[:, 0]
    for row in findings["BLOOM"]["priors"]:
        published = [float(alibi[row["head"], 511 - d] - alibi[row["head"], 511]) for d in row["distance"]]
        assert row["log_prior"] == pytest.approx(published, rel=1e-5, abs=1e-6)
        assert row["prior"] == "laplace"


def test_t5_has_its_published_biases(findings: dict[str, dict[str, Any]], folders: dict[str, Path]) -> None:
    model: Any = T5ForConditionalGeneration.from_pretrained(folders["T5"]).requires_grad_(False)
    distances = curve_distances(512)
    for row in findings["T5"]["priors"]:
        stack = model.encoder if row["layer"] < 2 else model.decoder
        bias = stack.block[0].layer[0].SelfAttention.compute_bias(512, 512)[0, row["head"]]
        assert row["distance"] == distances
        assert row["log_prior"] == pytest.approx([float(bias[511, 511 - d]) for d in distances], abs=1e-6)
        if row["layer"] < 2:
            assert row["log_prior_ahead"] == pytest.approx([float(bias[0, d]) for d in distances], abs=1e-6)
        else:
            assert "log_prior_ahead" not in row


def test_gpt_2_has_an_additive_split_and_others_a_reason(findings: dict[str, dict[str, Any]]) -> None:
    split = findings["GPT-2"]["additive"]
    assert split["tokens"] == 96
    assert [row["head"] for row in split["heads"]] == [0, 1, 2, 3]
    for row in split["heads"]:
        parts = ("content_content", "content_position", "position_content", "position_position")
        assert all(row[part] > 1e-4 for part in parts)
    assert findings["GPT-2"]["positions"] == "a learned table"
    assert "adds no positions" in findings["ours"]["additive"]["reason"]
    assert findings["goat on Llama"]["positions"] == "rotary"


def test_encoders_see_later_tokens_and_have_no_pass_key(findings: dict[str, dict[str, Any]]) -> None:
    found = findings["an encoder"]
    assert (found["kind"], found["positions"]) == ("PriorEncoderForMaskedLM", "none")
    assert [row["role"] for row in found["priors"]] == ["local", "local", "local", "retrieval"] * 2
    for row in found["text"]["heads"]:
        assert row["inverse_temperature"] == pytest.approx(math.log(96))  # every query sees all tokens
    for row in found["priors"]:
        assert row["log_prior_ahead"] == pytest.approx(row["log_prior"])  # μ = 0
    assert "with an encoder is not asked for pass keys" in found["passkey"]["reason"]
    assert "adds no positions" in found["additive"]["reason"]


@pytest.mark.parametrize(
    ("name", "kind", "before"),
    [
        ("linear", PriorDecoderForCausalLM, range(96)),
        ("a linear encoder", PriorEncoderForMaskedLM, [95] * 96),
    ],
)
def test_the_linear_toy_has_cases_and_slopes(
    name: str,
    kind: Any,
    before: Iterable[int],
    findings: dict[str, dict[str, Any]],
    folders: dict[str, Path],
    tokenizer: Any,
) -> None:
    text = torch.tensor(tokenizer.encode(TEXT)[:96])
    audit = first_layer_linear_audit(kind.from_pretrained(folders[name]).eval(), text)
    rows = findings[name]["additive"]["heads"]
    assert [row["case"] for row in rows] == audit.cases
    places = [(query, tokens) for query, tokens in enumerate(before) if tokens > 0]
    for row, drift, skewed, drowned in zip(rows, audit.drift, audit.skewed, audit.drowned, strict=True):
        slopes, spoilt, lost = zip(
            *((float(drift[i]) / n, float(skewed[i]), float(drowned[i])) for i, n in places), strict=True
        )
        assert row["slope"] == pytest.approx(sum(slopes) / len(places), rel=1e-4)
        assert row["skewed"] == pytest.approx(sum(spoilt) / len(places))
        assert row["drowned"] == pytest.approx(sum(lost) / len(places))
    assert "case" not in findings["GPT-2"]["additive"]["heads"][0]


def test_prompt_parts_are_located(tokenizer: Any) -> None:
    sample = figure_4_prompt(tokenizer)
    words = tokenizer.decode(sample.tokens[: sample.needle_start])
    assert words.endswith("about the important information there.\n")
    assert tokenizer.decode(sample.tokens[sample.needle_start : sample.needle_end]).strip().endswith("is the pass key.")
    assert tokenizer.decode(sample.tokens[sample.question_start : sample.answer_start]).strip().startswith("What is")
    assert sample.question_start - sample.needle_end == 768
    assert tokenizer.decode(sample.answer) == str(sample.key)
    assert len(sample.prompt) == PasskeyTexts(tokenizer, wording="long").minimum_length + 768


def test_weights_on_the_pass_key_match_the_model(
    findings: dict[str, dict[str, Any]], folders: dict[str, Path], tokenizer: PreTrainedTokenizerFast
) -> None:
    found, sample = findings["ours"]["passkey"], figure_4_prompt(tokenizer)
    model = PriorDecoderForCausalLM.from_pretrained(folders["ours"]).eval()
    with torch.no_grad():
        weights = model(sample.prompt[None], output_attentions=True).attentions
    assert len(found["heads"]) == 8
    for row in found["heads"]:
        mine = weights[row["layer"]][0, row["head"]]
        last = mine[-1, sample.needle_start : sample.needle_end]
        assert row["needle"] == pytest.approx(float(last.sum()), abs=1e-5)
        assert row["highest"] == pytest.approx(float(last.max()), abs=1e-5)
        assert row["first"] == pytest.approx(float(mine[-1, 0]), abs=1e-5)
    for shown in found["maps"]:
        torch.testing.assert_close(
            shown["weights"].float(), weights[shown["layer"]][0, shown["head"]], rtol=1e-3, atol=1e-3
        )
    assert {findings["ours"]["priors"][4 * m["layer"] + m["head"]]["role"] for m in found["maps"]} == {
        "retrieval", "local",
    }  # fmt: skip


@pytest.mark.usefixtures("drawn")
def test_the_page_contains_its_figures(findings: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    write_inspection(findings["ours"], tmp_path / "page.html")
    check_page((tmp_path / "page.html").read_text(encoding="utf-8"), findings["ours"])


@pytest.mark.parametrize(
    "name", every_other_deep(MODELS, ["ours", "linear", "an encoder", "GPT-2", "short GPT-2", "T5"])
)
def test_the_page_is_complete(name: str, findings: dict[str, dict[str, Any]], page_of: Callable[[str], str]) -> None:
    check_page(page_of(name), findings[name])


def check_page(source: str, found: dict[str, Any]) -> None:
    page = Page(source)
    assert page.open == []
    assert inspection_summary(found) in page.text
    for picture in page.all("img"):
        kind, content = picture["src"].split(",", 1)
        assert kind == "data:image/png;base64"
        assert base64.b64decode(content)[:4] == b"\x89PNG"
        assert picture["alt"].endswith(".")
    assert not re.search(r"(?:src|href)\s*=\s*[\"'](?!data:|#)", source)
    assert "url(" not in source
    assert len(source) < 6_000_000
    maps = [picture for picture in page.all("img") if "passkey prompt" in picture["alt"]]
    assert len(maps) == len(found["passkey"].get("maps", ()))
    targets = {link["href"][1:] for link in page.all("a")}
    assert targets <= {section.get("id") for section in page.all("section")}


@in_a_browser
@pytest.mark.usefixtures("drawn")
@pytest.mark.parametrize("width", [1440, 390])
def test_the_page_works_in_a_browser(
    browser: Any,
    findings: dict[str, dict[str, Any]],
    tmp_path: Path,
    width: int,
) -> None:
    write_inspection(findings["ours"], tmp_path / "page.html")
    opened = Opened(browser, tmp_path / "page.html", width)
    opened.check()
    reached = []
    for _ in range(12):
        opened.page.keyboard.press("Tab")
        reached.append(opened.page.evaluate("document.activeElement.getAttribute('aria-label') || ''"))
    assert {"heads", "reach"} <= {*reached}  # tables that may scroll sideways
    opened.context.close()


@in_a_browser
@pytest.mark.usefixtures("drawn")
@pytest.mark.parametrize("width", [1440, 390])
def test_maps_fit_their_labels_and_scroll_in_narrow_windows(
    browser: Any, findings: dict[str, dict[str, Any]], tmp_path: Path, width: int
) -> None:
    write_inspection(findings["ours"], tmp_path / "page.html")
    opened = Opened(browser, tmp_path / "page.html", width)
    opened.check()
    maps = len(findings["ours"]["passkey"]["maps"])
    # 7 points of a figure of 8.4 inches.
    letters = opened.each(".map img", "7 / (8.4 * 72) * e.getBoundingClientRect().width")
    assert len(letters) == maps
    assert min(letters) >= 9
    scrolls = opened.each(".map", "e.scrollWidth > e.clientWidth")
    assert scrolls == [width < 800] * maps
    assert opened.each(".map", "e.tabIndex") == [0] * maps
    assert all(opened.each(".map", "e.getAttribute('role') === 'region' && e.getAttribute('aria-label') !== null"))
    opened.context.close()


@pytest.mark.parametrize(("across", "down"), [(28, 13), (32, 22), (33, 23), (64, 40)])
def test_labels_of_tokens_do_not_overlap(across: int, down: int) -> None:
    ends = list(itertools.accumulate((30, across, 100, down)))
    passkey = {
        "instruction": [0, ends[0]], "needle": ends[:2], "filler": ends[1:3], "question": ends[2:],
        "needle_tokens": ["␣pass"] * across, "question_tokens": ["␣pass"] * down,
    }  # fmt: skip
    figure = attention_map(passkey, {"weights": torch.full((ends[-1], ends[-1]), 0.1).tril()}, "head 0.0")
    png(figure)  # lays the figure out
    closer = figure.axes[0]
    for number, axis, tokens, room in (
        (0, closer.xaxis, across, closer.get_window_extent().width),
        (1, closer.yaxis, down, closer.get_window_extent().height),
    ):
        places = axis.get_ticklocs()
        assert len(places) >= tokens / 3, number
        apart = (places[1] - places[0]) * room / tokens * 72 / figure.dpi
        assert apart >= 1.1 * 7, number


def test_the_page_explains_the_choice_of_maps(
    findings: dict[str, dict[str, Any]], folders: dict[str, Path], page_of: Callable[[str], str], tmp_path: Path
) -> None:
    def words(source: str) -> str:
        return " ".join(Page(source).text.split())

    def page(found: dict[str, Any]) -> str:
        write_inspection(found, tmp_path / "page.html")
        return words((tmp_path / "page.html").read_text(encoding="utf-8"))

    most = "3 of the heads with most weight on the pass key"
    whys = [shown["why"] for shown in findings["GPT-2"]["passkey"]["maps"]]
    assert whys == ["most"] * 3 + ["least"] * 3  # all heads have one role
    assert f"Maps, in order: {most} and 3 of the heads with least weight on the pass key." in words(page_of("GPT-2"))
    found = findings["some heads"]
    needle = {(row["layer"], row["head"]): row["needle"] for row in found["passkey"]["heads"]}
    chosen: dict[str, list[float]] = {}
    for shown in found["passkey"]["maps"]:
        chosen.setdefault(shown["why"], []).append(needle.pop((shown["layer"], shown["head"])))
    assert [*chosen] == ["most", "kind", "least"]
    assert min(chosen["most"]) >= max(needle.values())
    assert max(chosen["least"]) <= min(needle.values())
    assert "of heads with other roles (for each role, the head with most weight on the pass key)" in words(
        page_of("some heads")
    )
    plan = InspectionPlan(length=64, text=TEXT, text_tokens=16, heads=((1, 0), (0, 2)))
    found = inspect_model(load_inspected(folders["GPT-2"]), plan)
    assert [(shown["layer"], shown["head"]) for shown in found["passkey"]["maps"]] == [(1, 0), (0, 2)]
    assert "Maps, in order: 2 of the requested heads." in page(found)
    for shown in found["passkey"]["maps"]:
        del shown["why"]  # files of earlier versions lack it
    assert "Maps, in order" not in page(found)


def test_models_without_priors_are_reported_as_such(findings: dict[str, dict[str, Any]]) -> None:
    without = {"linear", "a linear encoder", "a scale on some heads", "GPT-2", "short GPT-2"}
    for name, found in findings.items():
        assert {layer["has_prior"] for layer in found["layers"]} == {name not in without}, name
        table = inspection_tables(found)["layers"]
        words = {line[table.header.index("prior")] for line in table.lines}
        assert words == {"uniform" if name in without else "yes"}, name


def test_custom_model_masks_are_reported(tokenizer: Any, tmp_path: Path) -> None:
    """Llama 4's chunks are known only as a matrix, which is causal."""
    config = Llama4TextConfig(
        **SMALL, intermediate_size=32, intermediate_size_mlp=32, num_hidden_layers=4, num_key_value_heads=2, head_dim=6,
        num_local_experts=2, attention_chunk_size=16, no_rope_layers=[1, 1, 1, 0],
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    found = inspect_model(
        load_inspected(tmp_path / "model"), InspectionPlan(length=64, text=TEXT, text_name="a text", text_tokens=48)
    )
    assert [layer["causal"] for layer in found["layers"]] == [True] * 4
    assert [layer["own_mask"] for layer in found["layers"]] == [True] * 3 + [False]
    assert not any("log_prior_ahead" in row for row in found["priors"])
    tables = inspection_tables(found)
    sees = [line[2] for line in tables["layers"].lines]
    assert sees == ["preceding tokens, within the model's own mask"] * 3 + ["preceding tokens"]
    for name in ("reach", "heads"):
        assert "In 3 of 4 layers, the model's own mask may hide further keys" in tables[name].caption
    for layer in found["layers"]:
        layer["own_mask"] = False
    tables = inspection_tables(found)
    assert "mask" not in tables["reach"].caption
    assert {line[2] for line in tables["layers"].lines} == {"preceding tokens"}


def test_layers_that_see_one_key_do_not_stop_the_inspection(tokenizer: Any, tmp_path: Path) -> None:
    config = MistralConfig(**SMALL, intermediate_size=32, num_hidden_layers=2, num_key_value_heads=2, sliding_window=1)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    found = inspect_model(load_inspected(tmp_path / "model"), InspectionPlan(length=64, text=TEXT, text_tokens=16))
    assert found["text"].keys() == {"reason"}
    assert "in layer 0, model.layers.0.self_attn, no query of the text sees two keys" in found["text"]["reason"]
    assert len(found["priors"]) == len(found["passkey"]["heads"]) == 8
    write_inspection(found, tmp_path / "page.html")
    assert "Not measured: in layer 0" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_without_a_tokenizer_only_the_priors_are_described(tmp_path: Path) -> None:
    ours().save_pretrained(tmp_path / "model")
    found = inspect_model(load_inspected(tmp_path / "model"), InspectionPlan(length=64, text=TEXT))
    assert len(found["priors"]) == 8
    for part in ("text", "passkey"):
        assert "no tokenizer" in found[part]["reason"]
    write_inspection(found, tmp_path / "page.html")
    assert "Not measured" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_a_tokenizer_without_end_token_is_not_used(tokenizer: Any, tmp_path: Path) -> None:
    ours().save_pretrained(tmp_path / "model")
    endless = copy.deepcopy(tokenizer)
    endless.eos_token = None
    endless.save_pretrained(tmp_path / "model")
    found = inspect_model(load_inspected(tmp_path / "model"), InspectionPlan(length=64, text=TEXT))
    assert "has no eos_token" in found["text"]["reason"]


def test_without_a_tokenizer_a_model_must_have_positions_for_a_few_tokens(tmp_path: Path) -> None:
    config = GPT2Config(vocab_size=VOCABULARY, n_embd=24, n_layer=1, n_head=4, n_positions=8)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match="a table of 8 positions and cannot read rows of 16 tokens"):
        inspect_model(load_inspected(tmp_path / "model"), InspectionPlan(length=64))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"length": 4096.5}, "length: Input should be a valid integer"),
        ({"length": "4k"}, "length: Input should be a valid integer"),
        ({"length": 1}, "length: Input should be greater than or equal to 2, got 1"),
        ({"length": 2**24 + 1}, "length: Input should be less than or equal to 16777216, got 16777217"),
        ({"text_tokens": 10.5}, "text_tokens: Input should be a valid integer"),
        ({"text_tokens": 3}, "text_tokens: Input should be greater than or equal to 4, got 3"),
        ({"text": 5}, "text: Input should be a valid string, got 5"),
        ({"heads": "0.1"}, "heads: Input should be a valid tuple, got '0.1'"),
        ({"heads": ((0,),)}, "heads.0.1: missing"),
    ],
)
def test_invalid_plans_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        validated(wrong, InspectionPlan)


def test_without_a_text_no_additive_split_is_shown(tmp_path: Path) -> None:
    """Random tokens would say nothing about positions. A missing split has its reason."""
    for name, reason in (("GPT-2", "no tokenizer"), ("goat on Llama", "adds no positions")):
        MODELS[name]().save_pretrained(tmp_path / name)
        found = inspect_model(load_inspected(tmp_path / name), InspectionPlan(length=64, text=TEXT))
        assert found["additive"].keys() == {"reason"}
        assert reason in found["additive"]["reason"]


def test_only_the_read_part_of_a_text_is_tokenised(
    folders: dict[str, Path], tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = load_inspected(folders["ours"])
    assert given.tokenizer is not None
    whole, sizes = given.tokenizer.encode, list[int]()

    def encode(text: str) -> list[int]:
        """Encode a text with runs of spaces merged."""
        return whole(re.sub(" +", " ", text))

    def counted(text: str) -> list[int]:
        sizes.append(len(text))
        return encode(text)

    monkeypatch.setattr(given.tokenizer, "encode", counted)
    texts = {"words": TEXT * 500, "few tokens": "e" + " " * 3000 + TEXT * 50, "short": TEXT}
    for name, text in texts.items():
        expected = encode(text)[:64]
        assert _tokens(given, InspectionPlan(text=text, text_tokens=64))[0].tolist() == expected, name
    assert max(sizes) < 10_000 < len(texts["words"])


def test_curves_of_later_keys_are_drawn_if_they_differ(
    findings: dict[str, dict[str, Any]], page_of: Callable[[str], str]
) -> None:
    for name, layers in (("T5", {0, 1}), ("an encoder", set()), ("ours", set())):
        found = findings[name]
        figure = prior_curves(inspection_results(found)["prior"], found["title"])
        assert figure is not None
        drawn = {
            layer for layer, axes in enumerate(figure.axes) for line in axes.lines if "ahead" in str(line.get_gid())
        }
        assert drawn == layers
        assert ("Thin lines" in page_of(name)) is bool(layers)


def test_the_page_describes_its_figures(findings: dict[str, dict[str, Any]], page_of: Callable[[str], str]) -> None:
    pages = {name: Page(page_of(name)).text for name in ("ours", "linear", "GPT-2")}
    scaled = ("The curves show the priors as learned", "multiplied by the logit scale as in attention")
    assert all((words in pages["ours"], words in pages["GPT-2"]) == (True, False) for words in scaled)
    assert "γ" in pages["ours"]
    for name, page in pages.items():
        assert "at least e times the share of the second key" in " ".join(page.split())
        assert ("Case i: neither" in page) == (name == "linear")
        assert re.search(
            r"the model predicted .* of .*, each from the true ones before it\.", inspection_summary(findings[name])
        )


def test_the_scatter_includes_gaussians_within_sums(tokenizer: Any, tmp_path: Path) -> None:
    config = PriorDecoderConfig(
        **SMALL, intermediate_size=32, num_hidden_layers=1,
        prior=[{"name": "generalized_gaussian", "init": "spread"}, {"name": "key_sink", "train_length": 64}],
    )  # fmt: skip
    PriorDecoderForCausalLM(config).save_pretrained(tmp_path / "model")
    found = inspect_model(load_inspected(tmp_path / "model"), InspectionPlan(length=64))
    write_inspection(found, tmp_path / "page.html")
    page = Page((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert [picture for picture in page.all("img") if picture["alt"].startswith("Shape β against θα")]
    heads = inspection_tables(found)["heads"].header
    assert {"generalized gaussian β", "generalized gaussian θα", "key sink bump"} <= {*heads}
    assert "generalized gaussian amplitude" not in heads


def test_the_command_writes_page_and_results(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attention_priors.lab.inspect.inspection.REACH_LENGTHS", REACH_LENGTHS)
    (tmp_path / "text.py").write_text(TEXT, encoding="utf-8")
    heads = ["--heads", "1.3", "--heads", "0.0"]
    arguments = ["--text", str(tmp_path / "text.py"), "--tokens", "64", "--length", "1k", *heads]
    done = CliRunner().invoke(app, ["inspect", str(folders["ours"]), *arguments, "--output", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert "8 heads in 2 layers" in " ".join(done.output.split())
    found = json.loads((tmp_path / "out" / "inspection.json").read_text(encoding="utf-8"))
    assert [(shown["layer"], shown["head"]) for shown in found["passkey"]["maps"]] == [(1, 3), (0, 0)]
    for row in found["priors"]:
        assert [*row["reach"]] == [str(2**k) for k in (10, 12, 14, 16, 18, 20)]
    assert found["length"] == 1024
    assert found["text"]["name"] == "text.py"
    assert (tmp_path / "out" / "inspection.html").stat().st_size < 6_000_000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--heads", "9.0"], "there is no head 0 of layer 9"),
        (["--heads", "x"], "'x' is not a head"),
        (["--length", "1"], "length: Input should be greater than or equal to 2, got 1"),
        (["--length", "100m"], "length: Input should be less than or equal to 16777216, got 104857600"),
        (["--length", "x"], "length: 'x' is not a number of tokens"),
        (["--text", "nowhere.txt"], "nowhere.txt"),
    ],
)
def test_invalid_options_are_named(options: list[str], message: str, folders: dict[str, Path], tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["inspect", str(folders["ours"]), "--output", str(tmp_path / "out"), *options])
    assert done.exit_code == 1
    assert message in " ".join(done.output.split())
    assert not [*tmp_path.glob("out/*")]


def test_image_classifiers_are_refused(tmp_path: Path) -> None:
    small = PriorVisionConfig(
        image_size=8, patch_size=4, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
    )
    PriorVisionForImageClassification(small).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"is a classifier of images: expected a language model"):
        load_inspected(tmp_path)


def test_missing_models_leave_no_folder(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["inspect", str(tmp_path / "nowhere"), "--output", str(tmp_path / "out")])
    assert "does not exist as a folder" in " ".join(done.output.split())
    assert not [*tmp_path.iterdir()]


def test_encoders_of_transformers_are_refused_by_name(tmp_path: Path) -> None:
    config = BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=30)
    BertModel(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"an encoder \(bert\); .* inspect supports encoders of this package"):
        load_inspected(tmp_path)


def test_unwritable_outputs_are_named_before_any_work(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out").write_text("a file")
    monkeypatch.setattr("attention_priors.lab.inspect.load_inspected", lambda *_, **__: pytest.fail("it was loaded"))
    done = CliRunner().invoke(app, ["inspect", str(folders["ours"]), "--output", str(tmp_path / "out")])
    assert done.exit_code == 1
    assert "cannot write to the output folder" in " ".join(done.output.split())


def test_texts_beyond_learned_positions_are_refused(folders: dict[str, Path]) -> None:
    plan = InspectionPlan(text=TEXT, text_tokens=200)
    with pytest.raises(ValueError, match="a table of 128 positions and cannot read rows of 200 tokens"):
        inspect_model(load_inspected(folders["short GPT-2"]), plan)


def test_the_default_length_is_limited_by_the_table(folders: dict[str, Path]) -> None:
    found = inspect_model(load_inspected(folders["short GPT-2"]), InspectionPlan(length=64, text=TEXT * 4))
    assert found["text"]["tokens"] == 128
    assert "a table of 128 positions" in found["passkey"]["reason"]


def test_models_without_priors_attend_by_content(findings: dict[str, dict[str, Any]]) -> None:
    assert "the content (the model's own positions: a learned table) determines all attention, as there is " \
        "no prior." in inspection_summary(findings["GPT-2"])  # fmt: skip
    assert "mean over heads, and the content the rest" in inspection_summary(findings["ours"])
    assert "the content (the model's own positions: rotary) the rest" in inspection_summary(findings["goat on Llama"])


def test_inspections_of_other_models_are_not_overwritten(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, kind in (("one", "GPT-2"), ("other", "ours")):
        shutil.copytree(folders[kind], tmp_path / name / "same")
    arguments = ["inspect", "--tokens", "16", "--length", "64", "--heads", "0.0"]
    for model in ("one/same", str(tmp_path / "one" / "same")):
        assert CliRunner().invoke(app, [*arguments, model]).exit_code == 0
    done = CliRunner().invoke(app, [*arguments, "other/same"])
    assert done.exit_code == 1
    assert "output: runs/inspect/same holds the inspection of " in " ".join(done.output.split())


def test_texts_must_be_text(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="is not UTF-8 text"):
        text_to_read(str(tmp_path / "binary"))
    (tmp_path / "genome.fa").write_text(">chr1 x\nACGTNACG\nTT\n>chr2\nGG\n")
    assert text_to_read(str(tmp_path / "genome.fa")) == ("chr1:1-10", "ACGTNACGTT")
    name, content = text_to_read("embedded")
    assert name.endswith("of Python's standard library")
    assert len(content) > 10_000
