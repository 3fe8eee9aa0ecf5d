"""Sphinx extension that writes parts of pages from the code, in place of ``<!-- generated: NAME -->``, and llms.txt."""

import inspect
import os
import re
import runpy
from collections.abc import Iterable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import typer
from docutils import nodes
from matplotlib import rc_context
from matplotlib.figure import Figure
from recipe_keys import recipe_keys
from sphinx import addnodes
from sphinx.application import Sphinx
from typer.cli import get_docs_for_click

import attention_priors
from attention_priors import Laplace, Prior, ShawVectors, Spectral, SSMax, Structure, grid_positions
from attention_priors._io import write_bytes
from attention_priors.attention.plan import Backend, make_plan, why_not
from attention_priors.attention.problem import make_problem
from attention_priors.lab.bench.run import BenchRecipe
from attention_priors.lab.cli import app as command_line
from attention_priors.lab.cli.recipes import NamedRecipe, recipe_paths
from attention_priors.lab.study.images.recipe import ImageRecipe
from attention_priors.lab.study.recipe import Recipe
from attention_priors.lab.train.recipe import TrainRecipe

ROOT = Path(__file__).parents[2]
CATALOGUE = runpy.run_path(str(ROOT / "docs" / "catalogue.py"))
MARKER = re.compile(r"<!-- generated: (\w+) -->")
PACKAGES = ("attention", "priors", "encodings", "models", "hf")
HEADS = 4

# ---- gallery

SAMPLES = {
    "Uniform": "prior = Uniform(4)",
    "Laplace": "prior = Laplace(4)",
    "GeneralizedGaussian": 'prior = GeneralizedGaussian(4, init={"theta_alpha": -1.5, "beta": [-0.5, 0.25, 0.5, 1.0]})',
    "Kerple": 'prior = Kerple(4, init={"r1": [0.5, 1.0, 1.5, 2.0], "r2": 0.5})',
    "Fire": "prior = Fire(4)",
    "Spectral": 'prior = Spectral(4, init="sandwich")',
    "KeySink": 'prior = KeySink(4, train_length=128, init={"slope": [0.0, 0.01, 0.02, 0.04], "bump": [4, 3, 2, 1]})',
    "RelativeBuckets": 'prior = RelativeBuckets(4, init="normal")',
    "ClippedOffsets": 'prior = ClippedOffsets(4, init="normal")',
    "Window": "prior = Window(4, size=32)",
    "Axial": 'prior = Axial(4, rows="laplace")',
    "Spectral2d": 'prior = Spectral2d(4, init="recency")',
    "Radial": 'prior = Radial(4, prior="laplace")',
    "KeySink2d": "prior = KeySink2d(4, rows=15, columns=15)\ntorch.nn.init.normal_(prior.gain)  # zeros at first",
}
"""Python that makes each prior of the gallery."""
LOWEST = -8.0
"""Log-prior in nats below which curves and maps are cut off."""
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")
PLAIN = {
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), "#808080"),
    "axes.spines.top": False,
    "axes.spines.right": False,
    "font.size": 9,
    "svg.hashsalt": "attention-priors",
}
"""Style that is legible on white and on black."""


def gallery(figures: Path, page: Path) -> str:
    """Draw every prior into the folder ``figures``, and return the Markdown of the gallery in the folder ``page``."""
    figures.mkdir(parents=True, exist_ok=True)
    parts = []
    for kind in CATALOGUE["CLASSES"]:
        torch.manual_seed(0)
        made: dict[str, Any] = {"torch": torch, **vars(attention_priors)}
        exec(SAMPLES[kind.__name__], made)
        prior = made["prior"]
        path = figures / f"{kind.name}.svg"
        with rc_context(PLAIN):
            (_maps if prior.over_grid else _curves)(prior).savefig(path, transparent=True, metadata={"Date": None})
        drawn = "maps around the middle patch" if prior.over_grid else "curves of 128 tokens"
        summary, formula = _first_line(kind)
        parts.append(
            f"## {kind.__name__}\n\n"
            f"{summary}. {{py:class}}`Arguments <attention_priors.priors.{kind.__name__}>`\n\n{formula}\n\n"
            f"![Log-prior of four heads of {kind.__name__}: {drawn}]({os.path.relpath(path, page)})\n\n"
            f"```python\n{SAMPLES[kind.__name__]}\n```\n"
        )
    return "\n".join(parts)


def _first_line(kind: type[Prior]) -> tuple[str, str]:
    words, formula = (inspect.getdoc(kind) or "").split("\n\n")[0].replace("\n", " ").split(": ``", 1)
    return _plain(words), f"`{formula.removesuffix('.').removesuffix(', in nats').replace('``', '`')}"


def _curves(prior: Prior) -> Figure:
    positions = torch.arange(128)
    values = prior.log_prior(positions[-1:], positions)[:, 0].detach()
    of_keys = Structure.OF_KEYS in prior.structure
    figure = Figure((4.6, 2.2), layout="constrained")
    axes = figure.add_subplot(xlabel="position of the key" if of_keys else "distance in tokens", ylabel="nats")
    axes.set(xlim=(-2, 129))
    for number, (head, colour) in enumerate(zip(values, COLOURS, strict=True)):
        axes.plot(positions if of_keys else 127 - positions, head, color=colour, label=f"head {number}")
    figure.legend(loc="outside right upper", frameon=False)
    if axes.dataLim.height == 0:  # a flat line, whose own range would be arbitrary
        axes.set_ylim(-1, 1)
    axes.set_ylim(bottom=max(axes.get_ylim()[0], LOWEST))
    return figure


def _maps(prior: Prior) -> Figure:
    positions = grid_positions(15, 15)
    values = prior.log_prior(positions[112:113], positions).detach().reshape(HEADS, 15, 15)
    figure = Figure((5.6, 1.7), layout="constrained")
    plots = figure.subplots(1, HEADS)
    for number, (axes, head) in enumerate(zip(plots, values, strict=True)):
        image = axes.imshow(head, vmin=max(float(values.min()), LOWEST), vmax=float(values.max()))
        axes.set(title=f"head {number}", xticks=(), yticks=())
    figure.colorbar(image, ax=plots, label="nats", aspect=12)
    return figure


# ---- support matrix

BACKENDS: tuple[Backend, ...] = ("toeplitz", "lanes", "flex", "triton")


def support_of_priors() -> str:
    """Return the table of priors and backends."""
    rows = {}
    for kind in CATALOGUE["CLASSES"]:
        # Both positions of a grid, or none.
        places = dict.fromkeys(("query_positions", "key_positions"), grid_positions(2, 4)) if kind.over_grid else {}
        rows[f"`{kind.__name__}`"] = _reasons(kind.examples(HEADS)[0], causal=not kind.over_grid, **places)
    rows["`Laplace` + `KeySink`"] = _reasons(Laplace(HEADS) + attention_priors.KeySink(HEADS, 64))
    return _support_table("prior", rows)


def support_of_arguments() -> str:
    """Return the table of dtypes, gradients and arguments, and backends, for a prior that every backend computes."""
    prior = Spectral(HEADS)
    positions = torch.arange(8)
    cases: dict[str, dict[str, Any]] = {
        **{
            f"`torch.{dtype}`": {"dtype": getattr(torch, dtype)}
            for dtype in ("float32", "bfloat16", "float16", "float64")
        },
        "gradient of query, key, value": {"requires_grad": True},
        "gradient of the prior": {"learned": True},
        "`causal=False`": {"causal": False},
        "`logit_scale`": {"logit_scale": SSMax(HEADS).requires_grad_(False)},
        "`query_positions`, `key_positions`": {"query_positions": positions, "key_positions": positions},
        "`document_ids`": {"document_ids": torch.zeros(1, 8, dtype=torch.int64)},
        "`key_padding_mask`": {"key_padding_mask": torch.zeros(1, 8, dtype=torch.bool)},
        "`attn_mask`": {"attn_mask": torch.zeros(8, 8)},
        "gradient of `attn_mask`": {"attn_mask": torch.zeros(8, 8, requires_grad=True)},
        "`key_bias`": {"key_bias": torch.zeros(1, HEADS, 8)},
        "`null_logit`": {"null_logit": torch.zeros(HEADS)},
        "`return_lse=True`": {"need_lse": True},
        "`relative`": {"relative": ShawVectors(16)},
        "`dropout_p`": {"dropout_p": 0.1},
    }
    return _support_table("problem", {name: _reasons(prior, **case) for name, case in cases.items()})


def _reasons(
    prior: Prior,
    *,
    dtype: torch.dtype = torch.float32,
    requires_grad: bool = False,
    learned: bool = False,
    need_lse: bool = False,
    **options: Any,
) -> list[str | None]:
    """Return why each backend cannot compute a problem, and the backends that ``auto`` chooses."""
    query, key, value = torch.zeros(3, 1, HEADS, 8, 16, dtype=dtype, requires_grad=requires_grad)
    problem = make_problem(query, key, value, prior.requires_grad_(learned), **options)
    need_lse = need_lse or problem.null_logit is not None
    # The interpreter's rules are the kernels', without a device.
    with patch.dict(os.environ, TRITON_INTERPRET="1"):
        reasons = [why_not(problem, backend, need_lse=need_lse) for backend in BACKENDS]
    on_cpu = make_plan(problem, "auto", need_lse=need_lse).engine
    return [*reasons, on_cpu, "triton" if reasons[-1] is None else on_cpu]


def _support_table(first: str, rows: dict[str, list[str | None]]) -> str:
    notes: dict[tuple[str, str], int] = {}
    lines = [
        f"| {first} | {' | '.join(f'`{name}`' for name in BACKENDS)} | `auto` on CPUs | `auto` on CUDA |",
        f"|---|{'---|' * (len(BACKENDS) + 2)}",
    ]
    for name, (*reasons, on_cpu, on_cuda) in rows.items():
        cells = [
            "yes"
            if reason is None
            else f"no&nbsp;({notes.setdefault((backend, reason.split(';')[0]), len(notes) + 1)})"
            for backend, reason in zip(BACKENDS, reasons, strict=True)
        ]
        lines.append(f"| {name} | {' | '.join(cells)} | `{on_cpu}` | `{on_cuda}` |")
    return "\n".join([*lines, "", *(f"{number}. `{backend}`: {note}." for (backend, note), number in notes.items())])


# ---- lists


def recipes() -> str:
    """Return the tables of recipes, one for each command, with the files and descriptions."""
    found = [NamedRecipe.read(path) for path in recipe_paths().values()]
    parts = []
    for command in ("compare", "train", "bench"):
        parts.append(f"## Recipes of `{command}`\n\n| recipe | description |\n|---|---|")
        for recipe in (recipe for recipe in found if recipe.command == command):
            file = os.path.relpath(recipe.path, ROOT / "docs")
            parts.append(f"| [{recipe.path.stem}]({file}) | {_with_options(' '.join(recipe.description.split()))} |")
        parts.append("")
    return "\n".join(parts)


def commands() -> str:
    """Return the sections of all commands, each with its usage, arguments and options."""
    command = typer.main.get_command(command_line)
    text = get_docs_for_click(obj=command, ctx=typer.Context(command), name="attention-priors", title="All commands")
    # The lists of commands cut summaries short, and the sections have them in full.
    text = re.sub(r"\*\*Commands\*\*:\n\n(?:\* .*\n)+\n", "", text)
    return "#" + _with_options(text)


def _with_options(text: str) -> str:
    """Write the options in a text as code, because two hyphens of plain text become a dash."""
    return re.sub(r"(?<= )--[a-z-]+", r"`\g<0>`", text)


def names() -> str:
    """Return the table of the names that ``attention_priors`` exports, with links to their packages."""
    lines = ["| name | summary |", "|---|---|"]
    for name in sorted(attention_priors.__all__, key=str.lower):
        package = next(each for each in PACKAGES if name in import_module(f"attention_priors.{each}").__all__)
        summary = (inspect.getdoc(getattr(attention_priors, name)) or "").split("\n\n")[0]
        lines.append(f"| {{py:obj}}`{name} <attention_priors.{package}.{name}>` | {_plain(summary)} |")
    return "\n".join(lines)


def _plain(text: str) -> str:
    text = re.sub(r":\w+:`([^`]*)`", r"`\1`", " ".join(text.split()))
    return text.replace("``", "`").replace("|", r"\|")


def write_parts(app: Sphinx, page: str, source: list[str]) -> None:
    """Replace each marker of a page by its part."""

    def part(marker: re.Match[str]) -> str:
        if marker[1] == "gallery":
            return gallery(Path(app.doctreedir) / "figures", Path(app.srcdir, page).parent)
        return PARTS[marker[1]]()

    source[0] = MARKER.sub(part, source[0])


PARTS = {
    "support_of_priors": support_of_priors,
    "support_of_arguments": support_of_arguments,
    "recipes": recipes,
    "commands": commands,
    "keys_of_compare": partial(recipe_keys, Recipe),
    "keys_of_compare_images": partial(recipe_keys, ImageRecipe),
    "keys_of_train": partial(recipe_keys, TrainRecipe),
    "keys_of_bench": partial(recipe_keys, BenchRecipe),
    "names": names,
}

# ---- llms.txt


def write_llms(app: Sphinx, error: Exception | None) -> None:
    """Write ``llms.txt``: the site's summary, and each page with its title and first sentence."""
    if error is not None or app.builder.format != "html":
        return
    root = app.env.get_doctree(app.config.root_doc)
    lines = [f"# {app.config.project}", "", f"> {_paragraph(root)}"]
    for tree in root.findall(addnodes.toctree):
        lines += ["", f"## {tree['caption']}", "", *_entries(app, tree["includefiles"])]
    write_bytes(Path(app.outdir) / "llms.txt", ("\n".join(lines) + "\n").encode())


def _entries(app: Sphinx, pages: Iterable[str]) -> Iterable[str]:
    for page in pages:
        first = re.split(r"(?<=\.) (?=[A-Z])", _paragraph(app.env.get_doctree(page)))[0]
        yield f"- [{app.env.titles[page].astext()}]({app.builder.get_target_uri(page)}): {first}"
        yield from _entries(app, app.env.toctree_includes.get(page, ()))


def _paragraph(doctree: nodes.document) -> str:
    return " ".join(next(iter(doctree.findall(nodes.paragraph))).astext().split())


def setup(app: Sphinx) -> dict[str, Any]:
    """Register what is written as pages are read and when the site is built."""
    app.connect("source-read", write_parts)
    app.connect("build-finished", write_llms)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
