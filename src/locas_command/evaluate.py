"""`locas eval`: the protocols, shared by the processes of a launcher.

The same command continues an interrupted run.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.console import Console

from locas_settings import ReadSettings, StageSettings, StudySettings

from . import options
from .console import check_shared_device, open_consoles, show_progress
from .options import BaseOptions, check_absent, split_names

METHODS = (
    "separated by commas: none, lora, locas-glu, locas-mlp; "
    "each also as NAME@WIDTH, NAME:RATE or both."
)
Out = Annotated[
    options.NamedPath, Parameter(help="folder for figures, single results and memories.")
]
Methods = Annotated[str, Parameter(help=METHODS)]


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The methods of a run, and where its results go."""

    method: Methods = "none,lora,locas-glu"
    out: Out = Path("locas-eval")
    overwrite: options.Overwrite = False


@dataclass(frozen=True, kw_only=True)
class LearningRunOptions(RunOptions):
    """A run of methods that learn."""

    method: Methods = "lora,locas-glu"


@dataclass(frozen=True, kw_only=True)
class AskingOptions:
    """What is asked about a dialogue.

    Args:
        setting: no-context, evidence (the turns with the answer in context), full-context;
            separated by commas.
        wrong_memory: also ask each conversation with another one's memory.
        max_new_tokens: the most tokens of an answer.
        study: the dialogues are studied (locas study) in place of being read.
        exchanges: with --study, questions wanted about each sentence.
        passes: with --study, the most times that each exchange is learned.
    """

    setting: str = "no-context,evidence,full-context"
    wrong_memory: Annotated[bool, Parameter(negative="--no-wrong-memory")] = True
    max_new_tokens: options.Count = 32
    study: bool = False
    exchanges: options.Count | None = None
    passes: options.Count | None = None


# The options of a dataclass stand beside those of the command.
RunGroup = Annotated[RunOptions, Parameter(name="*")]
LearningRunGroup = Annotated[LearningRunOptions, Parameter(name="*")]
AskingGroup = Annotated[AskingOptions, Parameter(name="*")]
RUN = RunOptions()
LEARNING_RUN = LearningRunOptions()
ASKING = AskingOptions()


def perplexity(
    *texts: options.Text,
    dataset: str | None = None,
    split: str | None = None,
    column: str | None = None,
    limit_documents: options.Count | None = None,
    unwrap: options.Unwrap = None,
    run: RunGroup = RUN,
    settings: options.ManyMethods = options.READ,
    base: options.BaseGroup = options.BASE,
) -> None:
    """Online perplexity: each token scored before it is learned, a fresh memory for each document.

    Args:
        texts: UTF-8 text files, folders of .txt files, or - for stdin.
        dataset: load a dataset instead: hub name or folder.
        split: of the dataset; "test" by default.
        column: of the dataset: where the texts are; "text" by default.
        limit_documents: the first documents.
    """
    from locas_peft.evaluation import load_column, load_documents, run_perplexity

    consoles = _open(run.out, base)
    if bool(texts) == (dataset is not None):
        raise ValueError("give either TEXT files or --dataset NAME, one of the two")
    if dataset is None:
        check_absent("without --dataset", split=split, column=column)
        documents = load_documents(texts, limit_documents)
    else:
        documents = load_column(dataset, split or "test", column or "text", limit_documents)
    loaded, methods = _load(base, settings, run.method)
    ids = {}
    for name, text in documents.items():
        ids[name] = loaded.encode(text, settings.max_tokens, unwrap)
    _run(partial(run_perplexity, documents=ids), loaded, methods, run, consoles)


def locomo(
    data: Path,
    /,
    *,
    conversations: str | None = None,
    limit_sessions: options.Count | None = None,
    asking: AskingGroup = ASKING,
    run: RunGroup = RUN,
    settings: options.ManyMethods = options.READ,
    base: options.BaseGroup = options.BASE,
) -> None:
    """LoCoMo: questions about a dialogue, with its memory, another one's, and none.

    Args:
        data: LoCoMo's JSON.
        conversations: only these, by sample_id, separated by commas.
        limit_sessions: the first sessions of each conversation, and the questions whose evidence
            lies in them.
    """
    from locas_peft.evaluation.conversations import choose_conversations, keep_sessions, load_locomo
    from locas_peft.evaluation.locomo import LocomoPlan, run_locomo

    consoles = _open(run.out, base)
    stderr = consoles[1]
    plan = LocomoPlan(
        split_names(asking.setting, "--setting"),
        max_new_tokens=asking.max_new_tokens,
        wrong_memory=asking.wrong_memory,
    )
    in_file, problems = load_locomo(data)
    for problem in problems:
        stderr.print(problem)
    names = None if conversations is None else split_names(conversations, "--conversations")
    chosen = choose_conversations(in_file, names)
    if limit_sessions is not None:
        chosen = [keep_sessions(conversation, limit_sessions) for conversation in chosen]
        if not any(conversation.questions for conversation in chosen):
            rule = "--limit-sessions must leave the evidence of a question"
            raise ValueError(f"{rule}, got {limit_sessions}: take more sessions")
    if asking.wrong_memory and len(chosen) < 2:
        stderr.print(
            "no wrong-memory control: it needs a second conversation, whose memory is asked"
        )
    loaded, methods = _load(base, _choose_stage(asking, settings), run.method)
    protocol = partial(run_locomo, conversations=chosen, plan=plan)
    common = {"data": data.name, "left_out": problems}
    _run(protocol, loaded, methods, run, consoles, **common)


def forgetting(
    book: options.Text,
    /,
    *,
    unread: tuple[str, ...] | None = None,
    unread_tokens: options.AtLeastTwo = 50_000,
    own_answers: bool = False,
    unwrap: options.Unwrap = None,
    run: LearningRunGroup = LEARNING_RUN,
    settings: options.ManyMethods = options.READ,
    base: options.BaseGroup = options.BASE,
) -> None:
    """Forgetting: drift on unread text, before and after a book, and with the memory off.

    Args:
        book: a UTF-8 text file, or - for stdin: what the memory reads.
        unread: a text that the memory does not read; may be given again.
        unread_tokens: the first tokens of each unread text.
        own_answers: also measure the base's own answers to 16 everyday questions.
    """
    from locas_peft.evaluation.documents import load_documents
    from locas_peft.evaluation.forgetting import ForgettingPlan, run_forgetting
    from locas_peft.text import load_text

    consoles = _open(run.out, base)
    if not (unread or own_answers):
        raise ValueError("something must be measured: give --unread TEXT or --own-answers")
    content = load_text(book)
    documents = load_documents(unread or ())
    loaded, methods = _load(base, settings, run.method)
    texts = {}
    for name, text in documents.items():
        texts[name] = loaded.encode(text, unread_tokens, unwrap)
    ids = loaded.encode(content, settings.max_tokens, unwrap)
    protocol = partial(run_forgetting, book=ids, plan=ForgettingPlan(texts, own_answers))
    _run(protocol, loaded, methods, run, consoles)


def _choose_stage(asking: AskingOptions, settings: ReadSettings) -> StageSettings:
    """Return the settings of a reading, or those of a study where that is asked for."""
    if asking.study:
        known = {field.name for field in fields(StudySettings)}
        shared = {}
        for name, value in settings.list_given().items():
            if name in known:
                shared[name] = value
            elif value != getattr(options.READ, name):
                raise ValueError(f"{name} has no meaning for a study, got {value}: leave it out")
        return StudySettings(**shared, exchanges=asking.exchanges, passes=asking.passes)
    check_absent("without --study", exchanges=asking.exchanges, passes=asking.passes)
    return settings


def _open(out: Path, base: BaseOptions) -> tuple[Console, Console]:
    """Check the options that all protocols share; return the consoles of results and remarks."""
    from locas_peft.files import check_output_directory

    check_output_directory("--out", out)
    check_shared_device(base.device)
    return open_consoles()


def _load(base: BaseOptions, settings: StageSettings, method: str) -> tuple[Any, dict[str, Any]]:
    """Load the base; return it and the settings of each method, by its name."""
    from locas_peft.stages import complete, complete_all, split_methods

    from .running import load

    names = list(split_names(method, "--method"))
    methods: dict[str, Any] = {}
    if isinstance(settings, StudySettings) and "none" in names:
        # The base alone is asked beside memories that have studied.
        names.remove("none")
        methods["none"] = ReadSettings(method="none", max_tokens=settings.max_tokens)
    # Values that contradict each other are refused before the base is loaded.
    split_methods(settings, names)
    loaded = load(base)
    for name, alone in methods.items():
        methods[name] = complete(replace(alone, model=loaded.name), loaded.model)
    studied = complete_all(replace(settings, model=loaded.name), names, loaded.model)
    return loaded, {**methods, **studied}


def _run(
    protocol: Callable,
    base: Any,
    methods: dict[str, Any],
    run: RunOptions,
    consoles: tuple[Console, Console],
    **common: Any,
) -> None:
    """Run a protocol, with values `common` to all of its results, and print its figures."""
    from locas_peft import evaluation

    stdout, stderr = consoles
    dtype = str(base.model.dtype).removeprefix("torch.")
    common = {"model": base.name, "dtype": dtype, **common}
    with show_progress(stderr) as progress:
        figures = protocol(
            evaluation.Run(
                base.model,
                base.tokenizer,
                methods,
                run.out,
                common=common,
                overwrite=run.overwrite,
                progress=progress,
            )
        )
    for sheet in evaluation.tabulate_figures(figures):
        stdout.print(sheet.to_rich())
    folder = run.out / figures["study"]
    stdout.print(f"Figures: {folder}.json; single results below {folder}.")
