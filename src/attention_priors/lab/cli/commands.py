"""The commands: each reads its options, calls the library, and says where everything went."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

from rich.console import Console
from rich.markup import escape
from typer import Argument, BadParameter, Context, Exit, Option, Typer

from attention_priors.lab.cli.terminal import (
    TrainingDisplay,
    errors,
    head_of_layer,
    listed,
    name_of_model,
    number_of_tokens,
    quiet_transformers,
    seed_number,
    written,
)
from attention_priors.lab.progress import Bars

app = Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

RecipeOutput = Annotated[
    Path | None,
    Option(help="Where everything goes; by default runs/ and the recipe's file name, without its ending."),
]
"""Output folder of a command that reads a recipe."""

Device = Annotated[str | None, Option(help="cpu, cuda or cuda:N; CUDA where there is some by default.")]
"""Where a model is."""


@app.callback()
def _root(
    context: Context,
    plugin: Annotated[
        list[str] | None,
        Option(help="Import this module, which registers priors of your own; may be given more than once."),
    ] = None,
) -> None:
    """Attention with positional priors: train short, test long, see what each head learned."""
    context.obj = tuple(plugin or ())
    if plugin:
        from attention_priors.lab.strict_yaml import import_plugins

        with errors():
            import_plugins(plugin)


@app.command()
def compare(
    context: Context,
    recipe: Annotated[Path, Argument(help="A recipe: what to train and what to test.")],
    output: RecipeOutput = None,
    only: Annotated[
        list[str] | None,
        Option(help="Run this scheme alone, or those of a pattern (BAM*); may be given more than once."),
    ] = None,
    seeds: Annotated[
        list[str] | None, Option(help="Run these seeds alone, with commas between; may be given more than once.")
    ] = None,
    processes: Annotated[
        int | None, Option(min=1, help="Runs at a time; by default as many as there are cores for.")
    ] = None,
    scheduler: Annotated[
        str | None,
        Option(help="Address of a Dask scheduler (tcp://login1:8786); its workers share the output folder."),
    ] = None,
) -> None:
    """Train every scheme of a recipe, test it far past its training length or resolution, and write a report.

    Interrupt it when you like: the same command goes on from there. Several calls may share an output: each run is
    carried out by one of them.
    """
    console = Console()
    # The laboratory is imported here: it takes seconds, and --help should not.
    from attention_priors.lab import report as reports
    from attention_priors.lab import study
    from attention_priors.lab.output_folder import sole_writer
    from attention_priors.lab.results import Results

    output = output or Path("runs") / recipe.stem
    failed: study.RunFailedError | None = None
    with errors():
        asked = study.load_recipe(recipe)
        # Each run is a process of its own, and reads the recipe.
        asked = asked.model_copy(update={"plugins": tuple(dict.fromkeys((*context.obj, *asked.plugins)))})
        try:
            results = study.compare(
                asked,
                output,
                only=only or (),
                seeds=[seed_number(seed) for seed in listed(*seeds or ())],
                processes=processes,
                scheduler=scheduler,
                console=console,
            )
        except study.RunFailedError as error:
            failed, results = error, error.results
    if failed is not None:
        console.print(f"[bold red]error:[/] {escape(str(failed))}", highlight=False, soft_wrap=True)
    if len(results["run"]):
        # A call that ended meanwhile may have gathered more.
        with errors(), sole_writer(output, wait=math.inf):
            results = Results.read(output)
            try:
                page = reports.write_report(results, output)
            except reports.MissingDataError as error:
                page = error.page
                finished = {*zip(results["run"].scheme, results["run"].seed, strict=True)}
                if failed is None and all((name, seed) in finished for name in asked.schemes for seed in asked.seeds):
                    raise
                console.print(escape(f"{error}; not all runs are finished"), highlight=False, soft_wrap=True)
        if (overview := reports.overview_table(results)).lines:
            console.print(overview.terminal(intervals=results.of_images))
        written(console, "Report", page)
    if failed is not None:
        raise Exit(1)


@app.command()
def report(
    folders: Annotated[list[Path], Argument(help="Folders of comparisons, each with its results.jsonl.gz.")],
) -> None:
    """Draw the tables, figures and report of comparisons anew, from their results alone.

    A folder with a README.md keeps its words: its tables and figures alone are drawn.
    """
    from attention_priors.lab import report as reports
    from attention_priors.lab.results import Results

    console = Console()
    for folder in folders:
        with errors():
            page = reports.write_report(Results.read(folder), folder)
        written(console, "Report", page)


@app.command()
def train(
    recipe: Annotated[Path, Argument(help="A recipe: model, data, tokenizer, optimiser, schedule.")],
    output: RecipeOutput = None,
) -> None:
    """Train one model, on one device or, started by torchrun or accelerate launch, on many.

    Interrupt it when you like: the same command goes on from the last checkpoint.
    """
    from attention_priors.lab import train as training

    # Of several processes the first one speaks; errors come from each.
    console = Console(quiet=not training.is_first_process())
    output = output or Path("runs") / recipe.stem
    quiet_transformers()
    with errors(FloatingPointError):
        plan = training.load_train_recipe(recipe)
        with TrainingDisplay(console, plan.name, plan.training.total_steps) as display:
            training.run_recipe(plan, output, display.observer())
    written(console, "Model", output / "model")


@app.command()
def prepare(
    recipe: Annotated[Path, Argument(help="A recipe of the command train; its tokens are prepared.")],
    output: Annotated[
        Path | None,
        Option(help="Where the tokens go; where train looks for them by default, data in its own output."),
    ] = None,
) -> None:
    """Tokenise a recipe's text into memory-mapped files with checksums; what is there is checked, and mended.

    Interrupt it when you like: the same command goes on from there.
    """
    console = Console()
    from attention_priors.lab import train as training
    from attention_priors.lab.data import preparation

    folder = output or Path("runs") / recipe.stem / "data"
    with errors():
        plan = training.load_train_recipe(recipe)
        with TrainingDisplay(console, plan.name, 0) as display:
            observer = display.observer()
            preparation.prepare(
                plan.preparation(), folder, repair=True, on_tokens=observer.on_tokens, on_message=observer.on_message
            )
    written(console, "Tokens", folder)


@app.command()
def extend(
    model: Annotated[Path, Argument(help="A saved model, or the folder of its training.")],
    length: Annotated[str, Option(help="Tokens, or a multiple of what it was trained at.")] = "2x",
    steps: Annotated[int, Option(min=1, help="Of the optimiser.")] = 256,
    data: Annotated[
        Path | None, Option(help="Prepared tokens; those that the model was trained on by default.")
    ] = None,
    learning_rate: Annotated[
        float | None, Option(help="Constant; what the model's own training ended with by default.")
    ] = None,
    tokens_per_step: Annotated[int | None, Option(min=1, help="As in the model's own training by default.")] = None,
    output: Annotated[
        Path | None,
        Option(
            help="Where everything goes; by default extended-LENGTH in the folder of the model's training, or "
            "NAME-extended-LENGTH beside a model without one."
        ),
    ] = None,
) -> None:
    """Train a saved model a little further at a longer context, and measure the loss before and after.

    Interrupt it when you like: the same command goes on from there.
    """
    from attention_priors._io import number
    from attention_priors.lab import train as training

    console = Console(quiet=not training.is_first_process())
    if model.name in ("", ".."):  # `.` has neither a name nor a parent
        model = model.resolve()
    output = output or training.default_output(model, length)
    name = model.absolute().parent.name if model.name == "model" else model.name
    quiet_transformers()
    with errors(FloatingPointError), TrainingDisplay(console, f"Extending {name}", steps) as display:
        result = training.extend(
            model,
            output,
            length=length,
            steps=steps,
            data=data,
            learning_rate=learning_rate,
            tokens_per_step=tokens_per_step,
            observer=display.observer(),
        )
    for size, loss in result["loss"]["before"].items():
        after = number(result["loss"]["after"][size])
        console.print(f"{size} tokens: loss {number(loss):.4f} before, {after:.4f} after")
    written(console, "Model", output / "model")


@app.command()
def evaluate(
    context: Context,
    model: Annotated[
        str | None, Argument(help="A saved model: its folder, or its name on the Hugging Face Hub.")
    ] = None,
    task: Annotated[
        list[str], Option(help="What to measure, with commas between; --task list shows what there is.")
    ] = ["passkey"],  # noqa: B006
    lengths: Annotated[list[str], Option(help="Tokens, with commas between; 64k is 65536.")] = ["1k,2k,4k,8k"],  # noqa: B006
    depths: Annotated[int, Option(min=2, help="Depths, evenly spaced.")] = 20,
    trials: Annotated[int, Option(min=1, help="Texts per length and depth; continuations of a genome.")] = 1,
    corpus: Annotated[
        str, Option(help="For essays, fillers, perplexity: embedded, a file, a folder, package:NAME, FASTA.")
    ] = "embedded",
    sentences: Annotated[str, Option(help="What splits essays into sentences: regex, or NLTK's punkt.")] = "regex",
    documents: Annotated[int, Option(min=1, help="For perplexity, at most; pieces of a genome.")] = 8,
    passes: Annotated[int, Option(min=1, help="Of the timing.")] = 100,
    stop_after_zeros: Annotated[
        int, Option(min=0, help="Leave out longer texts after so many lengths without a right answer; 0 for no.")
    ] = 2,
    seed: Annotated[int, Option(min=0, help="Of the texts.")] = 0,
    chunk: Annotated[int, Option(min=1, help="Tokens of one forward pass: it bounds the memory.")] = 1024,
    batch: Annotated[int, Option(min=1, help="Questions of equal length that are read together.")] = 1,
    dtype: Annotated[str, Option(help="Of the weights: float32, bfloat16 or float16.")] = "float32",
    device: Device = None,
    output: Annotated[
        Path | None, Option(help="Where everything goes; runs/evaluate/NAME-OF-THE-MODEL by default.")
    ] = None,
) -> None:
    """Test a model far past its training length: retrieval, perplexity by position, time.

    For models of ours, models with priors attached, and any causal language model of transformers. Interrupt it when
    you like: the same command goes on from there, and measures nothing twice. Longer lengths, more trials and other
    models may share an output.
    """
    from pydantic import ValidationError

    from attention_priors._io import write_bytes
    from attention_priors.lab import evaluate as evaluation
    from attention_priors.lab import report as reports
    from attention_priors.lab.strict_yaml import explain

    console = Console()
    tasks = listed(*task)
    if tasks == ["list"]:
        for name, what in evaluation.TASKS.items():
            console.print(f"[bold]{name}[/]: {escape(what)}.", highlight=False)
        return
    if model is None:
        raise BadParameter("expected a saved model: its folder, or its name", param_hint="MODEL")
    output = output or Path("runs") / "evaluate" / name_of_model(model)
    quiet_transformers()
    with errors():
        # Settings of the plan that are options as they stand.
        same = ("depths", "trials", "seed", "corpus", "sentences", "documents", "passes")
        asked = {name: context.params[name] for name in same} | {
            "tasks": tasks,
            "lengths": sorted({number_of_tokens(length) for length in listed(*lengths)}),
            "stop_after_zeros": stop_after_zeros or None,
        }
        try:
            plan = evaluation.EvaluationPlan.model_validate(asked)
        except ValidationError as error:
            raise ValueError(explain(error, evaluation.EvaluationPlan)) from error
        with console.status("Loading the model"):
            subject = evaluation.Subject.load(model, dtype=dtype, device=device)
        bars = Bars(console, "{task.percentage:>3.0f} %")
        observer = evaluation.Observer(
            lambda what, done, total: bars.show(what, what, done, total),
            lambda message: bars.console.print(escape(message), highlight=False),
        )
        with bars:
            summary = evaluation.evaluate(subject, plan, output, chunk=chunk, batch=batch, observer=observer)
        results = reports.evaluation_results(summary, Path(model).name)
        tables = reports.evaluation_tables(results)
        write_bytes(output / "table.md", "\n".join(table.markdown() for table in tables).encode())
        reports.write_evaluation_figures(summary, results, output / "figures")
    for table in tables:
        console.print(table.terminal())
    written(console, "Results", output / "results.jsonl")


@app.command()
def inspect(
    model: Annotated[str, Argument(help="A saved model: its folder, or its name on the Hugging Face Hub.")],
    text: Annotated[
        str, Option(help="What it is to read: a file, or embedded for a file of Python's standard library.")
    ] = "embedded",
    tokens: Annotated[
        int | None,
        Option(min=4, help="How much of it is read; by default 512, or what the model has positions for."),
    ] = None,
    length: Annotated[str, Option(help="Tokens of the texts that priors are described for; 4k is 4096.")] = "4k",
    heads: Annotated[
        list[str] | None, Option(help="Whose attention maps are shown, as LAYER.HEAD, with commas between.")
    ] = None,
    device: Device = None,
    output: Annotated[
        Path | None, Option(help="Where everything goes; runs/inspect/NAME-OF-THE-MODEL by default.")
    ] = None,
) -> None:
    """Look inside a model: what each head's prior does, and what it explains of the attention.

    Writes one page, inspection.html, and its numbers but for the attention maps, inspection.json. For models of ours,
    models with priors attached, and those of transformers: decoders, BLOOM, MPT, T5.
    """
    from attention_priors._io import writable_folder, write_json
    from attention_priors.hf.loading import load_any_config
    from attention_priors.lab import inspect as inspection
    from attention_priors.lab import report as reports

    console = Console()
    quiet_transformers()
    with errors():
        if output is None:
            output = Path("runs") / "inspect" / name_of_model(model)
            inspection.check_same_model(output / "inspection.json", model)
        name, content = inspection.text_to_read(text)
        plan = inspection.InspectionPlan(
            length=number_of_tokens(length, "length"),
            text=content,
            text_name=name,
            text_tokens=tokens,
            heads=None if heads is None else tuple(head_of_layer(head) for head in listed(*heads)),
        )
        load_any_config(model)  # a model that is not there leaves no folder behind
        writable_folder(output)
        with console.status("Loading the model") as status:
            given = inspection.load_inspected(model, device=device)
            found = inspection.inspect_model(given, plan, status.update)
            status.update("Writing the page")
            reports.write_inspection(found, output / "inspection.html")
        for shown in found["passkey"].get("maps", ()):
            del shown["weights"]  # large, and drawn
        write_json(output / "inspection.json", found)
    console.print(escape(reports.inspection_summary(found)))
    written(console, "Page", output / "inspection.html")


@app.command()
def explore(
    output: Annotated[Path, Option(help="The page's file.")] = Path("runs") / "explorer.html",
) -> None:
    """Write a page on which people drag the parameters of priors: where they look, and the line that makes them.

    It needs no network and no server: open it in a browser.
    """
    from attention_priors.lab.report.pages import write_explorer

    with errors():
        write_explorer(output)
    written(Console(), "Page", output)


@app.command()
def bench(
    context: Context,
    recipe: Annotated[
        Path | None, Argument(help="A recipe, instead of the options below but --output and --memory-limit.")
    ] = None,
    lengths: Annotated[
        list[str] | None, Option(help="Tokens, with commas between; 64k is 65536; 512,1024 by default.")
    ] = None,
    passes: Annotated[
        list[str] | None,
        Option(help="Of forward, forward+backward, decode; with commas between; all by default."),
    ] = None,
    ways: Annotated[
        list[str] | None, Option(help="Contenders, with commas between; all by default. --ways list shows them.")
    ] = None,
    threads: Annotated[int | None, Option(help="CPU threads; PyTorch's choice by default.")] = None,
    dtype: Annotated[str | None, Option(help="float32 (default), bfloat16 or float16.")] = None,
    device: Annotated[str | None, Option(help="cpu (default), cuda or cuda:N.")] = None,
    batch: Annotated[int | None, Option(help="Sequences; 1 by default.")] = None,
    heads: Annotated[int | None, Option(help="8 by default.")] = None,
    head_dim: Annotated[int | None, Option(help="64 by default.")] = None,
    repetitions: Annotated[int | None, Option(help="3 by default; more for figures to be quoted.")] = None,
    neighbours: Annotated[
        int | None, Option(help="Busy processes, beside which every repetition is measured once more; none by default.")
    ] = None,
    seed: Annotated[int | None, Option(help="Of inputs and of the order of runs; 0 by default.")] = None,
    memory_limit: Annotated[
        float | None, Option(min=0.0, help="GiB that a case may take; nine tenths of what is free by default.")
    ] = None,
    output: Annotated[Path | None, Option(help="Where everything goes; runs/NAME by default.")] = None,
) -> None:
    """Measure time and memory of attend() beside attention without a prior, dense formulas and other packages.

    Interrupt it when you like: the same command goes on from there. More lengths, passes and ways may be added to
    the same output.
    """
    console = Console()
    from attention_priors._io import write_bytes
    from attention_priors.lab import bench as benchmark

    if ways is not None and listed(*ways) == ["list"]:
        for way in benchmark.WAYS.values():
            console.print(f"[bold]{way.name}[/]: {escape(way.label)}. {escape(way.times)}", highlight=False)
        return
    # All other options are keys of a recipe.
    apart = ("recipe", "memory_limit", "output")
    given = {name: value for name, value in context.params.items() if name not in apart and value not in (None, ())}
    given |= {name: listed(*given[name]) for name in ("passes", "ways") if name in given}
    with errors():
        if recipe is None:
            given |= {"lengths": [number_of_tokens(length) for length in listed(*lengths or ("512,1024",))]}
            plan = benchmark.make_bench_recipe(**{"repetitions": 3} | given)
        elif given:
            raise ValueError(
                f"with a recipe, {', '.join('--' + name.replace('_', '-') for name in given)} stands in it"
            )
        else:
            plan = benchmark.load_bench_recipe(recipe)
        output = output or Path("runs") / plan.name
        results = benchmark.bench(plan, output, memory_limit=memory_limit, console=console)
        table = output / "table.md"
        write_bytes(table, benchmark.markdown_tables(results).encode())
        benchmark.write_figures(results, output / "figures")
    for each in benchmark.tables(results):
        console.print(each.terminal(intervals=False), highlight=False)
    for line in benchmark.failures(results):
        console.print(escape(line), highlight=False)
    written(console, "Tables", table)


@app.command()
def selftest(device: Device = None) -> None:
    """Compare every engine of attend() with the dense formula in float64 on this machine.

    It prints a table for an issue, and ends with 1 if an engine is wrong.
    """
    from attention_priors.lab.selftest import compare_engines

    with errors():
        right = compare_engines(device, print)
    if not right:
        raise Exit(1)
