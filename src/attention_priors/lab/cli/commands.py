"""Commands of ``attention-priors``: each parses its options, calls the library and prints the output paths."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

from rich.console import Console
from rich.markup import escape
from typer import Argument, BadParameter, Context, Exit, Option, Typer

from attention_priors import __version__
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
    Option(help="Output folder (default: runs/ and the recipe's file name without its extension)."),
]
"""Option ``--output`` of commands that read a recipe."""

recipes_app = Typer(invoke_without_command=True)
app.add_typer(recipes_app, name="recipes")

Device = Annotated[str | None, Option(help="cpu, cuda or cuda:N (default: CUDA if available).")]
"""Option ``--device`` of commands that run a model."""


def _print_version(asked: bool) -> None:
    if asked:
        Console().print(f"attention-priors {__version__}", highlight=False)
        raise Exit


@app.callback()
def _root(
    context: Context,
    plugin: Annotated[
        list[str] | None,
        Option(help="Import a module that registers custom priors. Repeatable."),
    ] = None,
    version: Annotated[
        bool, Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Attention with positional priors: train short, test long, see what each head learned."""
    context.obj = tuple(plugin or ())
    if plugin:
        from attention_priors.lab.strict_yaml import import_plugins

        with errors():
            import_plugins(plugin)


@app.command()
def tour(
    no_browser: Annotated[bool, Option("--no-browser", help="Do not open the page in a browser.")] = False,
    device: Device = None,
    output: Annotated[Path, Option(help="Output folder.")] = Path("runs") / "tour",
) -> None:
    """Ask five small models for pass keys at 64 times their training length, look into one, and open a page.

    The models come with the package; nothing is trained or downloaded. You can interrupt the command; run it again to
    resume.
    """
    import webbrowser

    console = Console()
    console.print("Five models, trained at 128 tokens, read texts of up to 8192 tokens. This takes about a minute.")
    from attention_priors._io import writable_folder
    from attention_priors.lab import report as reports
    from attention_priors.lab import tour as stages

    page = output / "tour.html"
    quiet_transformers()
    with errors():
        writable_folder(output)
        with Bars(console, "{task.percentage:>3.0f} %") as bars:
            summaries = stages.ask_examples(
                output, device=device, on_work=lambda scheme, done, total: bars.show(scheme, scheme, done, total)
            )
        results = reports.tour_results(summaries, stages.TRAINED)
        console.print(reports.overview_table(results).terminal(intervals=False))
        with console.status("Looking into one model"):
            found = stages.inspect_example(device=device)
            reports.write_tour(results, stages.EXAMPLES[stages.INSPECTED], found, page)
            reports.write_inspection(found, output / "inspection.html")
    written(console, "Page", page)
    written(console, "All heads of one model", output / "inspection.html")
    if console.is_terminal and not no_browser:
        webbrowser.open(page.absolute().as_uri())


@recipes_app.callback()
def _recipes(context: Context) -> None:
    """List the recipes that come with the package. Commands take their names in place of paths."""
    if context.invoked_subcommand is not None:
        return
    from attention_priors.lab.cli.recipes import NamedRecipe, recipe_paths

    console = Console()
    found = {name: NamedRecipe.read(path) for name, path in recipe_paths().items()}
    for command in ("compare", "train", "bench"):
        console.print(f"For attention-priors {command}:", highlight=False)
        for name, recipe in found.items():
            if recipe.command == command:
                what = escape(recipe.description)
                console.print(f"  [bold]{name}[/]: {what}", highlight=False, soft_wrap=True)


@recipes_app.command("copy")
def copy_recipe(
    name: Annotated[str, Argument(help="Name of the recipe.")],
    output: Annotated[Path | None, Option(help="Path of the copy (default: NAME.yaml).")] = None,
) -> None:
    """Copy a recipe that comes with the package, to be edited."""
    from attention_priors._io import write_bytes
    from attention_priors.lab.cli.recipes import recipe_path

    output = output or Path(f"{name}.yaml")
    with errors():
        source = recipe_path(name)
        if output.exists():
            raise FileExistsError(f"{output} exists already; remove it, or pass another path with --output")
        write_bytes(output, source.read_bytes())
    written(Console(), "Recipe", output)


@app.command()
def compare(
    context: Context,
    recipe: Annotated[
        Path, Argument(help="Path or name of the comparison's recipe; the command recipes lists the names.")
    ],
    output: RecipeOutput = None,
    only: Annotated[
        list[str] | None,
        Option(help="Run only this scheme, or the schemes that match a pattern (BAM*). Repeatable."),
    ] = None,
    seeds: Annotated[list[str] | None, Option(help="Run only these seeds, comma-separated. Repeatable.")] = None,
    processes: Annotated[
        int | None, Option(min=1, help="Number of parallel runs (default: as many as the CPU cores allow).")
    ] = None,
    scheduler: Annotated[
        str | None,
        Option(help="Address of a Dask scheduler (tcp://login1:8786) whose workers share the output folder."),
    ] = None,
) -> None:
    """Train every scheme of a recipe, test it far past its training length or resolution, and write a report.

    You can interrupt the command; run it again to resume. Several calls may share an output folder and then divide
    the runs among them.
    """
    console = Console()
    # The lab is imported here because the import takes seconds, which would delay --help.
    from attention_priors.lab import report as reports
    from attention_priors.lab import study
    from attention_priors.lab.cli.recipes import find_recipe
    from attention_priors.lab.output_folder import sole_writer
    from attention_priors.lab.results import Results

    output = output or Path("runs") / recipe.stem
    failed: study.RunFailedError | None = None
    with errors():
        asked = study.load_recipe(find_recipe(recipe, "compare"))
        # Each run is a separate process, which imports the plugins of the recipe.
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
        # Another call may have written more results in the meantime.
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
    folders: Annotated[list[Path], Argument(help="Folders of comparisons, each with a results.jsonl.gz.")],
) -> None:
    """Rewrite the tables, figures and report of comparisons from their results.

    In a folder with a README.md, only tables and figures are rewritten.
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
    recipe: Annotated[Path, Argument(help="Path or name of a recipe; the command recipes lists the names.")],
    output: RecipeOutput = None,
) -> None:
    """Train a model on one device, or on many if started with torchrun or accelerate launch.

    You can interrupt the command; run it again to resume from the last checkpoint.
    """
    from attention_priors.lab import train as training
    from attention_priors.lab.cli.recipes import find_recipe

    # Only the first process prints progress; every process prints its errors.
    console = Console(quiet=not training.is_first_process())
    output = output or Path("runs") / recipe.stem
    quiet_transformers()
    with errors(FloatingPointError):
        plan = training.load_train_recipe(find_recipe(recipe, "train"))
        with TrainingDisplay(console, plan.name, plan.training.total_steps) as display:
            training.run_recipe(plan, output, display.observer())
    written(console, "Model", output / "model")


@app.command()
def prepare(
    recipe: Annotated[Path, Argument(help="Path or name of a recipe of the train command.")],
    output: Annotated[
        Path | None,
        Option(help="Folder for the tokens (default: data in train's output folder, where train reads them)."),
    ] = None,
) -> None:
    """Tokenise a recipe's text into memory-mapped files with checksums; check existing files and replace damaged ones.

    You can interrupt the command; run it again to resume.
    """
    console = Console()
    from attention_priors.lab import train as training
    from attention_priors.lab.cli.recipes import find_recipe
    from attention_priors.lab.data import preparation

    folder = output or Path("runs") / recipe.stem / "data"
    with errors():
        plan = training.load_train_recipe(find_recipe(recipe, "train"))
        with TrainingDisplay(console, plan.name, 0) as display:
            observer = display.observer()
            preparation.prepare(
                plan.preparation(), folder, repair=True, on_tokens=observer.on_tokens, on_message=observer.on_message
            )
    written(console, "Tokens", folder)


@app.command()
def extend(
    model: Annotated[Path, Argument(help="Folder of a saved model or of its training run.")],
    length: Annotated[str, Option(help="Context length in tokens, or a multiple of the training length.")] = "2x",
    steps: Annotated[int, Option(min=1, help="Number of optimiser steps.")] = 256,
    data: Annotated[
        Path | None, Option(help="Folder of prepared tokens (default: the model's training tokens).")
    ] = None,
    learning_rate: Annotated[
        float | None, Option(help="Constant learning rate (default: final rate of the model's training).")
    ] = None,
    tokens_per_step: Annotated[
        int | None, Option(min=1, help="Tokens per optimiser step (default: as in the model's training).")
    ] = None,
    output: Annotated[
        Path | None,
        Option(
            help="Output folder (default: extended-LENGTH in the folder of the model's training run, or "
            "NAME-extended-LENGTH beside a model without a run)."
        ),
    ] = None,
) -> None:
    """Train a saved model further at a longer context, and measure the loss before and after.

    You can interrupt the command; run it again to resume.
    """
    from attention_priors._io import number
    from attention_priors.lab import train as training

    console = Console(quiet=not training.is_first_process())
    if model.name in ("", ".."):  # `.` has no name and no parent
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
    model: Annotated[str | None, Argument(help="Folder of a saved model, or its name on the Hugging Face Hub.")] = None,
    task: Annotated[list[str], Option(help="Tasks, comma-separated. --task list shows them.")] = ["passkey"],  # noqa: B006
    lengths: Annotated[list[str], Option(help="Lengths in tokens, comma-separated; 64k is 65536.")] = ["1k,2k,4k,8k"],  # noqa: B006
    depths: Annotated[int, Option(min=2, help="Number of evenly spaced depths.")] = 20,
    trials: Annotated[
        int, Option(min=1, help="Texts per length and depth, or continuations per piece of a genome.")
    ] = 1,
    corpus: Annotated[
        str,
        Option(
            help="Corpus of essays, fillers and perplexity: embedded, a text or FASTA file, a folder, or package:NAME."
        ),
    ] = "embedded",
    sentences: Annotated[str, Option(help="Sentence splitter of essays: regex, or NLTK's punkt.")] = "regex",
    documents: Annotated[
        int, Option(min=1, help="Largest number of documents of perplexity, or of pieces of a genome.")
    ] = 8,
    passes: Annotated[int, Option(min=1, help="Number of timed passes; of decoding, ten times as many.")] = 100,
    stop_after_zeros: Annotated[
        int, Option(min=0, help="Skip longer texts after this many lengths without a right answer; 0 never skips.")
    ] = 2,
    seed: Annotated[int, Option(min=0, help="Seed of the texts.")] = 0,
    chunk: Annotated[int, Option(min=1, help="Tokens per forward pass; bounds memory.")] = 1024,
    batch: Annotated[int, Option(min=1, help="Number of texts of equal length per batch.")] = 1,
    dtype: Annotated[str, Option(help="Precision of the weights: float32, bfloat16 or float16.")] = "float32",
    device: Device = None,
    output: Annotated[Path | None, Option(help="Output folder (default: runs/evaluate/NAME-OF-THE-MODEL).")] = None,
) -> None:
    """Test a model far past its training length: retrieval, perplexity by position, time.

    The model may be one of this package, a model with attached priors, or any causal language model of transformers.
    You can interrupt the command; run it again to resume. Finished measurements are reused, so longer lengths, more
    trials and other models may share an output folder.
    """
    from attention_priors._io import with_nulls, write_bytes, write_json
    from attention_priors.lab import evaluate as evaluation
    from attention_priors.lab import report as reports
    from attention_priors.lab.strict_yaml import validated

    console = Console()
    tasks = listed(*task)
    if tasks == ["list"]:
        for name, what in evaluation.TASKS.items():
            console.print(f"[bold]{name}[/]: {escape(what)}.", highlight=False)
        return
    if model is None:
        raise BadParameter("expected the folder or the name of a saved model", param_hint="MODEL")
    output = output or Path("runs") / "evaluate" / name_of_model(model)
    quiet_transformers()
    with errors():
        # Settings of the plan that equal their options.
        same = ("depths", "trials", "seed", "corpus", "sentences", "documents", "passes")
        asked = {name: context.params[name] for name in same} | {
            "tasks": tasks,
            "lengths": sorted({number_of_tokens(length) for length in listed(*lengths)}),
            "stop_after_zeros": stop_after_zeros or None,
        }
        plan = validated(asked, evaluation.EvaluationPlan)
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
        totals = [{"model": subject.name} | row for row in summary.totals]
        write_json(output / "summary.json", with_nulls(totals))
        reports.write_evaluation_figures(summary, results, output / "figures")
    for table in tables:
        console.print(table.terminal())
    written(console, "Results", output / "results.jsonl")


@app.command()
def inspect(
    model: Annotated[str, Argument(help="Folder of a saved model, or its name on the Hugging Face Hub.")],
    text: Annotated[
        str, Option(help="File that the model reads, or embedded for a file of Python's standard library.")
    ] = "embedded",
    tokens: Annotated[
        int | None,
        Option(min=4, help="Number of tokens that the model reads (default: 512, or the model's maximum if smaller)."),
    ] = None,
    length: Annotated[str, Option(help="Text length in tokens for the description of priors; 4k is 4096.")] = "4k",
    heads: Annotated[
        list[str] | None, Option(help="Heads whose attention maps are shown, as comma-separated LAYER.HEAD.")
    ] = None,
    device: Device = None,
    output: Annotated[Path | None, Option(help="Output folder (default: runs/inspect/NAME-OF-THE-MODEL).")] = None,
) -> None:
    """Describe each head's prior, and measure how much of the head's attention the prior explains.

    The output is a page, inspection.html, and its numbers without the attention maps, inspection.json. The model may be
    one of this package, a model with attached priors, or a decoder, BLOOM, MPT or T5 of transformers.
    """
    from attention_priors._io import writable_folder, write_json
    from attention_priors.hf.loading import load_any_config
    from attention_priors.lab import inspect as inspection
    from attention_priors.lab import report as reports
    from attention_priors.lab.strict_yaml import validated

    console = Console()
    quiet_transformers()
    with errors():
        if output is None:
            output = Path("runs") / "inspect" / name_of_model(model)
            inspection.check_same_model(output / "inspection.json", model)
        name, content = inspection.text_to_read(text)
        asked = {
            "length": number_of_tokens(length, "length"),
            "text": content,
            "text_name": name,
            "text_tokens": tokens,
            "heads": None if heads is None else [head_of_layer(head) for head in listed(*heads)],
        }
        plan = validated(asked, inspection.InspectionPlan)
        load_any_config(model)  # fails before the folder is made if the model does not exist
        writable_folder(output)
        with console.status("Loading the model") as status:
            given = inspection.load_inspected(model, device=device)
            found = inspection.inspect_model(given, plan, status.update)
            status.update("Writing the page")
            reports.write_inspection(found, output / "inspection.html")
        for shown in found["passkey"].get("maps", ()):
            del shown["weights"]  # large, and on the page already
        write_json(output / "inspection.json", found)
    console.print(escape(reports.inspection_summary(found)))
    written(console, "Page", output / "inspection.html")


@app.command()
def explore(
    output: Annotated[Path, Option(help="File of the page.")] = Path("runs") / "explorer.html",
) -> None:
    """Write an interactive page: drag a prior's parameters, watch its shape, and copy the Python that makes it.

    Open the page in a browser. It needs no network and no server.
    """
    from attention_priors.lab.report.pages import write_explorer

    with errors():
        write_explorer(output)
    written(Console(), "Page", output)


@app.command()
def bench(
    context: Context,
    recipe: Annotated[
        Path | None,
        Argument(help="Path or name of a recipe. It replaces all options except --output and --memory-limit."),
    ] = None,
    lengths: Annotated[
        list[str] | None, Option(help="Lengths in tokens, comma-separated; 64k is 65536 (default: 512,1024).")
    ] = None,
    passes: Annotated[
        list[str] | None,
        Option(help="Passes, comma-separated (default: forward,forward+backward,decode)."),
    ] = None,
    ways: Annotated[
        list[str] | None, Option(help="Contenders, comma-separated (default: all). --ways list shows them.")
    ] = None,
    threads: Annotated[int | None, Option(help="Number of CPU threads (default: PyTorch's number).")] = None,
    dtype: Annotated[str | None, Option(help="float32, bfloat16 or float16 (default: float32).")] = None,
    device: Annotated[str | None, Option(help="cpu, cuda or cuda:N (default: cpu).")] = None,
    batch: Annotated[int | None, Option(help="Batch size (default: 1).")] = None,
    heads: Annotated[int | None, Option(help="Number of heads (default: 8).")] = None,
    head_dim: Annotated[int | None, Option(help="Dimension of a head (default: 64).")] = None,
    repetitions: Annotated[
        int | None, Option(help="Number of repetitions (default: 3). Use more for published figures.")
    ] = None,
    neighbours: Annotated[
        int | None,
        Option(help="Number of busy processes (default: 0). Every repetition is also measured beside them."),
    ] = None,
    seed: Annotated[int | None, Option(help="Seed of the inputs and of the order of runs (default: 0).")] = None,
    memory_limit: Annotated[
        float | None, Option(min=0.0, help="GiB that a case may use (default: nine tenths of the free memory).")
    ] = None,
    output: Annotated[Path | None, Option(help="Output folder (default: runs/NAME).")] = None,
) -> None:
    """Measure time and memory of attend(), attention without a prior, dense formulas and other packages.

    You can interrupt the command; run it again to resume. More lengths, passes and ways may be added to an output
    folder.
    """
    console = Console()
    from attention_priors._io import write_bytes
    from attention_priors.lab import bench as benchmark
    from attention_priors.lab.cli.recipes import find_recipe

    if ways is not None and listed(*ways) == ["list"]:
        for way in benchmark.WAYS.values():
            console.print(f"[bold]{way.name}[/]: {escape(way.label)}. {escape(way.times)}", highlight=False)
        return
    # The other options are keys of a recipe.
    apart = ("recipe", "memory_limit", "output")
    given = {name: value for name, value in context.params.items() if name not in apart and value not in (None, ())}
    given |= {name: listed(*given[name]) for name in ("passes", "ways") if name in given}
    with errors():
        if recipe is None:
            given |= {"lengths": [number_of_tokens(length) for length in listed(*lengths or ("512,1024",))]}
            plan = benchmark.make_bench_recipe(**{"repetitions": 3} | given)
        elif given:
            raise ValueError(
                f"{', '.join('--' + name.replace('_', '-') for name in given)}: not allowed with a recipe; "
                "set these values in the recipe"
            )
        else:
            plan = benchmark.load_bench_recipe(find_recipe(recipe, "bench"))
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

    The command prints a table for an issue. It exits with code 1 if an engine is wrong.
    """
    from attention_priors.lab.selftest import compare_engines

    with errors():
        right = compare_engines(device, print)
    if not right:
        raise Exit(1)
