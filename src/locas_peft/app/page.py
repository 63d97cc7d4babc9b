"""The layout of the page, in gradio. It shows what `sessions.py` does; all work is done there."""

import inspect
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from html import escape
from pathlib import Path
from typing import Any

import gradio as gr
import pandas as pd

from .. import demo
from ..library import Library
from ..memories import describe_memory
from ..memories.folder import MOST_BYTES, pack
from ..selfstudy.learning import EXCHANGES
from ..text import load_text, python_reference
from .sessions import (
    MOST_CHARACTERS,
    MOST_QUESTIONS,
    ROUTED,
    Job,
    SharedModel,
    Visitor,
    Visitors,
    explain,
)

__all__ = ["build", "serve"]

TICK_SECONDS = 0.5
REFERENCE_CHARACTERS = (
    24_000  # of the Python reference: about the 6,000 tokens of the demo's second act
)
ACCENT = "#1f6fb4"
LINES = {"without a memory": "#8b8f98", "with the memory": ACCENT}
PHASES = {
    "score": ("Without a memory", "tokens"),
    "read": ("Reading", "tokens"),
    "write": ("Asking itself", "passages"),
    "learn": ("Learning the answers", "steps"),
}
_FOLDER = Path(__file__).parent
CSS, INTRODUCTION = (
    (_FOLDER / name).read_text(encoding="utf-8") for name in ("page.css", "introduction.html")
)
FONTS = ["system-ui", "-apple-system", "Segoe UI", "Roboto", "sans-serif"]
MONO = ["ui-monospace", "Consolas", "monospace"]
THEME = gr.themes.Base(
    primary_hue="sky", neutral_hue="slate", radius_size="md", font=FONTS, font_mono=MONO
).set(
    color_accent=ACCENT,
    button_primary_background_fill=ACCENT,
    button_primary_background_fill_hover="#185a93",
)
PRIVATE = {
    "share": False,
    "ssr_mode": False,
    "pwa": False,
    "mcp_server": False,
    "enable_monitoring": False,
}
"""No share links, no service beside the page, no figures about its visitors."""


def serve(
    model: SharedModel,
    visitors: Visitors,
    host: str,
    port: int,
    open_browser: bool,
    announce: Callable[[str], None],
) -> None:
    """Serve the page until an exception, such as that of Ctrl-C; running readings are then stopped and kept.

    The model and the visitors are then closed. `announce` is called with the page's address when it can be opened.
    """
    os.environ["GRADIO_TEMP_DIR"] = str(
        visitors.folder / "gradio"
    )  # removed with the visitors' folders
    page = build(model, visitors).queue(default_concurrency_limit=32)
    options = {
        "theme": THEME,
        "css": CSS,
        "max_file_size": MOST_BYTES,
        "footer_links": [],
        "run_history": False,
    }
    options |= {
        "server_name": host,
        "server_port": port or None,
        "inbrowser": open_browser,
        **PRIVATE,
    }
    try:
        try:
            _, address, _ = page.launch(prevent_thread_lock=True, quiet=True, **options)
        except OSError:  # gradio's message names settings of its own
            remedy = "choose another --port, 0 for any free one, or another --host"
            raise ValueError(f"{host}:{port} cannot be listened on: {remedy}") from None
        announce(address)
        threading.Event().wait()
    finally:
        page.close(verbose=False)
        model.close()
        visitors.close()


def build(model: SharedModel, visitors: Visitors) -> gr.Blocks:
    """Return the page, with all of its events."""
    with gr.Blocks(title="locas", analytics_enabled=False, delete_cache=(600, 3600)) as page:
        key, chats = gr.BrowserState(None, storage_key="locas-visitor"), gr.State([[], []])
        seen, timer = gr.State(None), gr.Timer(TICK_SECONDS, active=False)
        gr.HTML(_HEADER.format(escape(model.name)), elem_id="header")
        with gr.Tabs() as tabs:
            with gr.Tab("Read", id="read"), gr.Row(equal_height=False):
                with gr.Column(scale=5, min_width=320):
                    hint = "Paste a text here, or take one below."
                    text = gr.Textbox(label="Text", lines=11, max_lines=11, placeholder=hint)
                    with gr.Row(elem_classes="small"):
                        take_page = gr.Button("The demo's page", size="sm")
                        take_reference = gr.Button("The Python reference", size="sm")
                        upload_text = gr.UploadButton(
                            "Upload a text", file_types=["text"], size="sm"
                        )
                    name = gr.Textbox(
                        label="Name of the memory", value="memory", max_lines=1, max_length=60
                    )
                    questions = gr.Slider(
                        0, MOST_QUESTIONS, 2 * EXCHANGES if model.can_chat else 0, step=4,
                        label="Questions about each sentence", visible=model.can_chat,
                        info="The model asks itself and learns the answers, to recall facts later. 0: only read.",
                    )  # fmt: skip
                    with gr.Row():
                        read = gr.Button("Read", variant="primary", scale=2, min_width=120)
                        stop = gr.Button("Stop", variant="stop", interactive=False, min_width=90)
                with gr.Column(scale=7, min_width=320):
                    progress = gr.HTML(INTRODUCTION)
                    plot = gr.LinePlot(
                        x="tokens read", y="perplexity so far", color="line", color_map=LINES, color_title=" ",
                        height=260, show_label=False, buttons=[], visible=False,
                    )  # fmt: skip
                    exchanges = gr.HTML(visible=False)
                    to_ask = gr.Button("Ask about it", variant="primary", visible=False)
            with gr.Tab("Ask", id="ask") as ask_tab:
                memory = gr.Dropdown([], label="Memory", value=None)
                with gr.Row(elem_classes="chats"):
                    options = {
                        "height": 400,
                        "render_markdown": False,
                        "buttons": [],
                        "feedback_options": None,
                    }
                    left = gr.Chatbot(label="Without a memory", elem_classes="without", **options)
                    right = gr.Chatbot(label="With the memory", elem_classes="with", **options)
                asked = gr.Textbox(
                    show_label=False, max_lines=3, max_length=4000, submit_btn=True, stop_btn=False,
                    placeholder="Ask both" if model.can_chat else "Begin a text: both continue it",
                )  # fmt: skip
                with gr.Row(elem_classes="small"):
                    about_page = [
                        demo.load_page_questions()[number].question for number in demo.SHOWN
                    ]
                    samples = [gr.Button(each, size="sm") for each in about_page if model.can_chat]
                    clear = gr.Button("New chat", size="sm")
            with gr.Tab("Shelf", id="shelf") as shelf_tab:
                chosen = gr.Radio([], label="Memories", elem_id="memories")
                about = gr.HTML(_about(None, None))
                with gr.Row(elem_classes="small"):
                    download = gr.Button("Download", interactive=False)
                    delete = gr.Button("Delete", variant="stop", interactive=False)
                with gr.Row(visible=False, elem_classes="confirm") as confirm:
                    question = gr.HTML("")
                    confirmed = gr.Button("Yes, delete it", variant="stop", size="sm")
                    cancel = gr.Button("Keep it", size="sm")
                new_name = gr.Textbox(
                    label="New name", max_lines=1, max_length=60, submit_btn="Rename", visible=False
                )
                packed = gr.File(visible=False, interactive=False)
                upload = gr.File(label="Upload a memory (zip)", file_types=[".zip"], height=140)

        shelf_view = [memory, chosen]
        job_view = [seen, timer, read, stop, progress, plot, exchanges, to_ask]
        chat_view = [left, right, chats]

        def on(
            trigger: Callable, inputs: list, outputs: list, progress: str = "hidden"
        ) -> Callable:
            """Register a function of the visitor and the inputs for an event."""

            def register(function: Callable) -> Callable:
                def stream(key: Any, *values: Any) -> Iterator:
                    try:
                        shown = function(visitors.find(key), *values)
                        yield from shown if inspect.isgenerator(shown) else [shown]
                    except (ValueError, OSError) as error:
                        gr.Warning(escape(explain(error)))
                        yield [gr.skip()] * len(outputs) if len(outputs) > 1 else gr.skip()

                run = (
                    stream
                    if inspect.isgeneratorfunction(function)
                    else lambda *values: next(stream(*values))
                )
                trigger(
                    run, [key, *inputs], outputs, api_visibility="private", show_progress=progress
                )
                return function

            return register

        def show_shelf(
            visitor: Visitor, asked: str | None = None, chosen: str | None = None
        ) -> list:
            names = visitor.shelf.list()
            labels = [
                (f"{name}  ·  {visitor.shelf.bytes_of(name) / 1e6:.1f} MB", name) for name in names
            ]
            asked = asked if asked in names else ROUTED if names else None
            chosen = chosen if chosen in names else None
            choices = names and [
                ("the one that the question is about", ROUTED),
                *((name, name) for name in names),
            ]
            return [
                gr.Dropdown(choices=choices, value=asked),
                gr.Radio(choices=labels, value=chosen),
            ]

        def show_job(visitor: Visitor, before: Any) -> list:
            job = visitor.job
            running = job is not None and not job.ended
            now = (
                None
                if job is None
                else (id(job), *map(len, job.chunks.values()), len(job.exchanges))
            )
            begin, stop = (
                gr.Button(interactive=not running),
                gr.Button(interactive=running and not job.stop.is_set()),
            )
            shown = INTRODUCTION if job is None else _show_job(job, model.jobs_before(job))
            details = (
                [gr.skip()] * 2 if now in (None, before) else [_plot(job), _show_exchanges(job)]
            )
            ask = gr.Button(visible=job is not None and job.memory is not None)
            return [now, gr.Timer(active=running), begin, stop, shown, *details, ask]

        @on(page.load, [], [key, *shelf_view, *job_view])
        def open_page(visitor: Visitor) -> list:
            return [visitor.key, *show_shelf(visitor), *show_job(visitor, None)]

        @on(timer.tick, [seen, *shelf_view], [*job_view, *shelf_view])
        def tick(visitor: Visitor, before: Any, asked: str | None, chosen: str | None) -> list:
            ended = visitor.job is not None and visitor.job.ended
            shown = (
                show_shelf(visitor, visitor.job.memory or asked, chosen)
                if ended
                else [gr.skip(), gr.skip()]
            )
            return [*show_job(visitor, before), *shown]

        for tab in (ask_tab, shelf_tab):  # others may have changed a shelf that is shared
            on(tab.select, shelf_view, shelf_view)(show_shelf)

        for trigger, inputs, load in (
            (take_page.click, [], lambda: [demo.load_page(), "lighthouse"]),
            (
                take_reference.click,
                [],
                lambda: [python_reference()[:REFERENCE_CHARACTERS], "python reference"],
            ),
            (
                upload_text.upload,
                [upload_text],
                lambda path: [_load_upload(path), _propose_name(path)],
            ),
        ):
            on(trigger, inputs, [text, name])(lambda visitor, *path, load=load: load(*path))

        @on(read.click, [text, name, questions], job_view)
        def begin(visitor: Visitor, text: str, name: str, questions: float) -> list:
            if visitor.job is not None and not visitor.job.ended:
                raise ValueError(
                    "a reading of yours is under way: stop it first, or wait for its end"
                )
            job = Job(name, text, int(questions))
            model.read(job, visitor.shelf)
            visitor.job = job
            return show_job(visitor, None)

        @on(stop.click, [], [stop])
        def stop_reading(visitor: Visitor) -> gr.Button:
            if visitor.job is not None:
                visitor.job.stop.set()
            return gr.Button(interactive=False)

        @on(to_ask.click, [], [tabs, *shelf_view])
        def go_to_ask(visitor: Visitor) -> list:
            return [
                gr.Tabs(selected="ask"),
                *show_shelf(visitor, visitor.job and visitor.job.memory),
            ]

        def ask(
            visitor: Visitor, name: str | None, question: str, chats: list[list[dict]]
        ) -> Iterator[list]:
            if not question.strip():
                raise ValueError("question must not be empty: ask something")
            former, chats = (
                chats,
                [[*chat, {"role": "user", "content": question.strip()}] for chat in chats],
            )
            written: deque[list[str]] = deque([["", ""]], maxlen=1)
            answer = model.ask(visitor.shelf, name or None, chats, written.append)
            field, ended = (
                "",
                False,
            )  # the field is emptied once: the next question may be typed meanwhile
            while not ended:
                time.sleep(0.1)
                ended = answer.done()
                if ended and answer.exception():
                    yield [question, *map(_show_chat, former), gr.skip()]
                    answer.result()
                wait = (
                    "(nothing)"
                    if ended
                    else "…"
                    if answer.running()
                    else "Waiting: the model is busy."
                )
                texts = [each.strip() or wait for each in written[0]]
                if not name:
                    texts[1:] = ["Choose a memory to see its answer."]
                turns = [{"role": "assistant", "content": each} for each in texts]
                if ended:
                    _, names, passage = answer.result()
                    turns[1]["head"] = f"[{', '.join(names) or 'no memory'}]\n" * (name == ROUTED)
                    turns[1]["tail"] = f"\n\nNearest passage of the text: {passage}" * bool(passage)
                shown = [[*chat, turn] for chat, turn in zip(chats, turns, strict=True)]
                yield [field, *map(_show_chat, shown), shown if ended else gr.skip()]
                field = gr.skip()

        for trigger, asks in (
            (asked.submit, asked),
            *((button.click, button) for button in samples),
        ):
            on(trigger, [memory, asks, chats], [asked, *chat_view])(ask)
        for trigger in (clear.click, memory.change):
            on(trigger, [], chat_view)(lambda visitor: [[], [], [[], []]])

        @on(chosen.change, [chosen], [about, new_name, confirm, delete, download])
        def choose(visitor: Visitor, chosen: str | None) -> list:
            buttons = [gr.Button(interactive=chosen is not None) for _ in (delete, download)]
            name = gr.Textbox(chosen or "", visible=chosen is not None)
            return [_about(visitor.shelf, chosen), name, gr.Row(visible=False), *buttons]

        @on(delete.click, [chosen], [confirm, question])
        def ask_back(visitor: Visitor, chosen: str) -> list:
            return [
                gr.Row(visible=True),
                f"Delete <b>{escape(chosen)}</b>? It cannot be brought back.",
            ]

        on(cancel.click, [], [confirm])(lambda visitor: gr.Row(visible=False))

        @on(new_name.submit, [chosen, new_name], shelf_view)
        def rename(visitor: Visitor, chosen: str, name: str) -> list:
            name = visitor.shelf.rename(chosen, name)
            return show_shelf(visitor, name, name)

        @on(confirmed.click, [memory, chosen], shelf_view)
        def forget(visitor: Visitor, asked: str | None, chosen: str) -> list:
            visitor.shelf.forget(chosen)
            return show_shelf(visitor, asked)

        @on(upload.upload, [upload], [upload, *shelf_view], "minimal")
        def put_on_shelf(visitor: Visitor, path: str) -> Iterator[list]:
            yield [
                None,
                gr.skip(),
                gr.skip(),
            ]  # the field is empty again, also where the memory is refused
            name = visitor.shelf.unpack(Path(path), _propose_name(path), model.check)
            yield [None, *show_shelf(visitor, name, name)]

        @on(download.click, [chosen], [packed])
        def offer(visitor: Visitor, chosen: str) -> gr.File:
            folder = visitor.shelf.find(chosen)
            for former in visitor.downloads.iterdir():
                former.unlink()
            pack(folder, archive := visitor.downloads / f"{folder.name}.zip")
            return gr.File(str(archive), label="Ready to download", visible=True)

    return page


def _show_chat(chat: list[dict[str, str]]) -> list[dict[str, str]]:
    """Return the turns of a conversation as they are shown: an answer between its memory and what is found."""
    parts = [[turn.get(part, "") for part in ("head", "content", "tail")] for turn in chat]
    return [
        {"role": turn["role"], "content": "".join(each)}
        for turn, each in zip(chat, parts, strict=True)
    ]


def _load_upload(path: str) -> str:
    if Path(path).stat().st_size > 4 * MOST_CHARACTERS:
        raise ValueError(
            f"text must have at most {MOST_CHARACTERS:,} characters, got a larger file: upload a part"
        )
    return load_text(path)


def _propose_name(path: str) -> str:
    """Return the name of an uploaded file as one that a memory can have."""
    return (
        " ".join(re.sub(r"[^\w .()-]|_", " ", Path(path).stem).split())[:50].strip(" .-(")
        or "memory"
    )


_HEADER = """<h1>Locas</h1><p>A language model reads a text once and keeps it, in a memory made of weights. The model
here is <b>{}</b>.</p>"""


def _show_job(job: Job, before: int) -> str:
    """Return the progress of a reading: a bar for each phase, a line, and two figures."""
    phases = {name: PHASES[name] for name in PHASES if job.questions or name in job.chunks}
    now, share, bars, figures = (
        ["waiting", *phases].index(job.phase),
        job.done / max(job.total, 1),
        "",
        "",
    )
    for number, (title, _) in enumerate(phases.values(), 1):
        width, current = (
            100 * (share if number == now else number < now),
            " current" * (number == now),
        )
        bars += f'<div class="phase{current}"><i><b style="width:{width:.1f}%"></b></i><span>{title}</span></div>'
    without, with_memory = job.curves
    same = without[: len(with_memory) or None]  # both figures are of the same tokens
    for kind, line, points in zip(("without", "with"), LINES, (same, with_memory), strict=True):
        value = f"{points[-1][1]:.2f}" if points else "–"
        figures += (
            f'<div class="figure {kind}"><b>{value}</b><span>perplexity so far, {line}</span></div>'
        )
    line = escape(_describe_job(job, before))
    return f'<div class="phases">{bars}</div><p class="line">{line}</p><div class="figures">{figures}</div>'


def _describe_job(job: Job, before: int) -> str:
    """Return one line: what happens, and for how long."""
    if job.ended and job.memory is None:
        return "Stopped before anything was learned." if job.outcome == "Stopped" else job.outcome
    if job.ended:
        barren = (
            " The model found nothing to ask itself." if job.questions and not job.exchanges else ""
        )
        return f"{job.outcome}. The memory is on the shelf: {job.memory}.{barren}"
    if job.phase == "waiting":
        return (
            f"Waiting: {before} other reading{'s' * (before > 1)} first." if before else "Starting."
        )
    if job.stop.is_set():
        return "Stopping after this step."
    title, unit = PHASES[job.phase]
    if (left := job.seconds_left) is None:
        return f"{title}: the first step takes longest"
    left = f"{left:.0f} s" if left < 90 else f"{left / 60:.0f} min"
    return f"{title}: {job.done:,} of {job.total:,} {unit}, about {left} left in this step"


def _plot(job: Job) -> gr.LinePlot:
    """Return the plot of the perplexity so far without and with the memory; hidden before there is any."""
    curves = dict(zip(LINES, job.curves, strict=True))
    rows = [
        (tokens, round(value, 2), name)
        for name, points in curves.items()
        for tokens, value in points
    ]
    if not rows:
        return gr.LinePlot(visible=False)
    # The first chunks, which little is known about, would flatten the lines that follow.
    values = [value for _, value, _ in rows]
    top = 1.1 * max(
        value for tokens, value, _ in rows if 10 * tokens >= job.chunks["score"][-1].stop
    )
    frame = pd.DataFrame(rows, columns=["tokens read", "perplexity so far", "line"])
    return gr.LinePlot(frame, visible=True, y_lim=[0.9 * min(values), top])


def _show_exchanges(job: Job) -> gr.HTML:
    """Return the exchanges of a self-study, the latest first."""
    if not job.exchanges:
        return gr.HTML(visible=False)
    items = "".join(
        f"<li><b>{escape(each.question)}</b> {escape(each.answer)}</li>"
        for each in job.exchanges[::-1]
    )
    title = f"<h3>{len(job.exchanges)} questions that the model asked itself</h3>"
    return gr.HTML(f"{title}<ul class='exchanges'>{items}</ul>", visible=True)


def _about(shelf: Library | None, chosen: str | None) -> str:
    """Return a line about the memory that is chosen on the shelf."""
    if shelf is None or chosen is None:
        return "<p class='line'>Choose a memory to rename, download or delete it.</p>"
    found = describe_memory(shelf.find(chosen))
    layers = f"{found['r']} slots beside each of {len(found['layers'])} FFNs of {found['base']}"
    return f"<p class='line'>{escape(layers)}: {found['parameters']:,} parameters, {found['bytes'] / 1e6:.1f} MB</p>"
