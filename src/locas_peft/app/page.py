"""The layout of the page, in gradio. It shows what `sessions.py` does; all work is done there."""

import inspect
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

import gradio as gr
import pandas as pd
from starlette.middleware import Middleware

from .. import demo
from ..exchanges import PER_PASSAGE
from ..library import Library
from ..library.names import propose_name
from ..memories import describe_memory
from ..memories.folder import MOST_BYTES, pack
from ..text import load_text, python_reference
from .requests import OwnPageAlone
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
MOST_QUESTION_CHARACTERS = 4_000
"""Of a question. A longer one would keep the model from all visitors."""
REFERENCE_CHARACTERS = 24_000
"""Characters of the Python reference: about 6,000 tokens."""
ACCENT = "#1f6fb4"
LINES = {"without a memory": "#8b8f98", "with the memory": ACCENT}
PHASES = {
    "score": ("Without a memory", "tokens"),
    "read": ("Reading", "tokens"),
    "write": ("Asking itself", "passages"),
    "learn": ("Learning the answers", "steps"),
}
_FOLDER = Path(__file__).parent
CSS = (_FOLDER / "page.css").read_text(encoding="utf-8")
INTRODUCTION = (_FOLDER / "introduction.html").read_text(encoding="utf-8")
THEME = gr.themes.Base(
    primary_hue="sky",
    neutral_hue="slate",
    radius_size="md",
    font=["system-ui", "-apple-system", "Segoe UI", "Roboto", "sans-serif"],
    font_mono=["ui-monospace", "Consolas", "monospace"],
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
_HEADER = """<h1>Locas</h1><p>A language model reads a text once and keeps it, in a memory made of
weights. The model here is <b>{}</b>.</p>"""

Chats = list[list[dict[str, str]]]
"""Two conversations, without and with a memory: turns with `role` and `content`.

A turn may have `head` and `foot`, which are shown around its content.
"""


def serve(
    model: SharedModel,
    visitors: Visitors,
    host: str,
    port: int,
    open_browser: bool,
    announce: Callable[[str], None],
) -> None:
    """Serve the page until an exception, such as that of Ctrl-C.

    Running readings are then stopped and kept, and the model and the visitors are closed.
    `announce` is called with the page's address when it can be opened.
    """
    # Removed with the visitors' folders.
    os.environ["GRADIO_TEMP_DIR"] = str(visitors.folder / "gradio")
    page = build(model, visitors).queue(default_concurrency_limit=32)
    try:
        try:
            _, address, _ = page.launch(
                prevent_thread_lock=True,
                quiet=True,
                theme=THEME,
                css=CSS,
                max_file_size=MOST_BYTES,
                footer_links=[],
                run_history=False,
                server_name=host,
                server_port=port or None,
                inbrowser=open_browser,
                app_kwargs={"middleware": [Middleware(OwnPageAlone, host=host)]},
                **PRIVATE,
            )
        except OSError:
            # gradio's message names settings of its own.
            remedy = "choose another --port, 0 for any free one, or another --host"
            raise ValueError(f"{host}:{port} cannot be listened on: {remedy}") from None
        announce(address)
        # Windows interrupts no wait without an end.
        while True:
            time.sleep(1.0)
    finally:
        page.close(verbose=False)
        model.close()
        visitors.close()


def build(model: SharedModel, visitors: Visitors) -> gr.Blocks:
    """Return the page, with all of its events."""
    return _Page(model, visitors).blocks


class _Page:
    """The components of the page, and what happens at their events.

    A method that is called at an event gets the visitor and the values of the event's inputs. It
    returns the new values of the event's outputs.
    """

    def __init__(self, model: SharedModel, visitors: Visitors):
        self._model = model
        self._visitors = visitors
        self.blocks = gr.Blocks(title="locas", analytics_enabled=False, delete_cache=(600, 3600))
        with self.blocks:
            self._key = gr.BrowserState(None, storage_key="locas-visitor")
            self._chats = gr.State([[], []])
            self._seen = gr.State(None)
            self._timer = gr.Timer(TICK_SECONDS, active=False)
            gr.HTML(_HEADER.format(escape(model.name)), elem_id="header")
            with gr.Tabs() as self._tabs:
                with gr.Tab("Read", id="read"), gr.Row(equal_height=False):
                    self._lay_out_reading()
                with gr.Tab("Ask", id="ask") as self._ask_tab:
                    self._lay_out_asking()
                with gr.Tab("Shelf", id="shelf") as self._shelf_tab:
                    self._lay_out_shelf()
            self._shelf_view = [self._memory, self._chosen]
            self._job_view = [
                self._seen,
                self._timer,
                self._read,
                self._stop,
                self._progress,
                self._plot,
                self._exchanges,
                self._to_ask,
            ]
            self._chat_view = [self._left, self._right, self._chats]
            self._connect_reading()
            self._connect_asking()
            self._connect_shelf()

    def _lay_out_reading(self) -> None:
        with gr.Column(scale=5, min_width=320):
            self._text = gr.Textbox(
                label="Text",
                lines=11,
                max_lines=11,
                placeholder="Paste a text here, or take one below.",
            )
            with gr.Row(elem_classes="small"):
                self._take_page = gr.Button("The demo's page", size="sm")
                self._take_reference = gr.Button("The Python reference", size="sm")
                self._upload_text = gr.UploadButton("Upload a text", file_types=["text"], size="sm")
            self._name = gr.Textbox(
                label="Name of the memory", value="memory", max_lines=1, max_length=60
            )
            self._questions = gr.Slider(
                0,
                MOST_QUESTIONS,
                PER_PASSAGE if self._model.can_chat else 0,
                step=4,
                label="Questions about each sentence",
                visible=self._model.can_chat,
                info="The model asks itself and learns the answers, to recall facts later. "
                "0: only read.",
            )
            with gr.Row():
                self._read = gr.Button("Read", variant="primary", scale=2, min_width=120)
                self._stop = gr.Button("Stop", variant="stop", interactive=False, min_width=90)
        with gr.Column(scale=7, min_width=320):
            self._progress = gr.HTML(INTRODUCTION)
            self._plot = gr.LinePlot(
                x="tokens read",
                y="perplexity so far",
                color="line",
                color_map=LINES,
                color_title=" ",
                height=260,
                show_label=False,
                buttons=[],
                visible=False,
            )
            self._exchanges = gr.HTML(visible=False)
            self._to_ask = gr.Button("Ask about it", variant="primary", visible=False)

    def _lay_out_asking(self) -> None:
        can_chat = self._model.can_chat
        self._memory = gr.Dropdown([], label="Memory", value=None)
        options = {
            "height": 400,
            "render_markdown": False,
            "buttons": [],
            "feedback_options": None,
        }
        with gr.Row(elem_classes="chats"):
            self._left = gr.Chatbot(label="Without a memory", elem_classes="without", **options)
            self._right = gr.Chatbot(label="With the memory", elem_classes="with", **options)
        self._question = gr.Textbox(
            show_label=False,
            max_lines=3,
            max_length=MOST_QUESTION_CHARACTERS,
            submit_btn=True,
            stop_btn=False,
            placeholder="Ask both" if can_chat else "Begin a text: both continue it",
        )
        self._samples: list[gr.Button] = []
        with gr.Row(elem_classes="small"):
            if can_chat:
                questions = demo.load_page_questions()
                for number in demo.ASKED:
                    self._samples.append(gr.Button(questions[number].question, size="sm"))
            self._clear = gr.Button("New chat", size="sm")

    def _lay_out_shelf(self) -> None:
        self._chosen = gr.Radio([], label="Memories", elem_id="memories")
        self._about = gr.HTML(_describe_chosen(None, None))
        with gr.Row(elem_classes="small"):
            self._download = gr.Button("Download", interactive=False)
            self._delete = gr.Button("Delete", variant="stop", interactive=False)
        with gr.Row(visible=False, elem_classes="confirm") as self._confirm:
            self._confirm_question = gr.HTML("")
            self._confirmed = gr.Button("Yes, delete it", variant="stop", size="sm")
            self._cancel = gr.Button("Keep it", size="sm")
        self._new_name = gr.Textbox(
            label="New name", max_lines=1, max_length=60, submit_btn="Rename", visible=False
        )
        self._packed = gr.File(visible=False, interactive=False)
        self._upload = gr.File(label="Upload a memory (zip)", file_types=[".zip"], height=140)

    def _on(
        self,
        trigger: Callable,
        function: Callable,
        inputs: list,
        outputs: list,
        progress: str = "hidden",
        cancels: Sequence[Any] = (),
    ) -> Any:
        """Call a function of the visitor and the inputs at an event; it may yield its outputs.

        Return the event. It ends the events that it cancels.
        """

        def stream(key: Any, *values: Any) -> Iterator:
            # An uploaded text is in the folder of the visitors, as their own shelves are.
            folders = [self._visitors.folder]
            try:
                visitor = self._visitors.find(key)
                folders.insert(0, visitor.shelf.folder)
                shown = function(visitor, *values)
                if inspect.isgenerator(shown):
                    yield from shown
                else:
                    yield shown
            except (ValueError, OSError) as error:
                gr.Warning(escape(explain(error, *folders)))
                yield [gr.skip()] * len(outputs) if len(outputs) > 1 else gr.skip()

        def run(key: Any, *values: Any) -> Any:
            return next(stream(key, *values))

        return trigger(
            stream if inspect.isgeneratorfunction(function) else run,
            [self._key, *inputs],
            outputs,
            api_visibility="private",
            show_progress=progress,
            cancels=list(cancels),
        )

    # ------------------------------------------------------------------ reading

    def _connect_reading(self) -> None:
        shelf, job = self._shelf_view, self._job_view
        self._on(self.blocks.load, self._open, [], [self._key, *shelf, *job])
        self._on(self._timer.tick, self._tick, [self._seen, *shelf], [*job, *shelf])
        text = [self._text, self._name]
        self._on(self._take_page.click, self._load_page, [], text)
        self._on(self._take_reference.click, self._load_reference, [], text)
        self._on(self._upload_text.upload, self._load_upload, [self._upload_text], text)
        self._on(self._read.click, self._begin, [*text, self._questions], job)
        self._on(self._stop.click, self._stop_reading, [], [self._stop])
        self._on(self._to_ask.click, self._go_to_ask, [], [self._tabs, *shelf])

    def _open(self, visitor: Visitor) -> list:
        return [visitor.key, *self._show_shelf(visitor), *self._show_job(visitor, None)]

    def _tick(self, visitor: Visitor, before: Any, asked: str | None, chosen: str | None) -> list:
        shelf = [gr.skip(), gr.skip()]
        if visitor.job is not None and visitor.job.ended:
            shelf = self._show_shelf(visitor, visitor.job.memory or asked, chosen)
        return [*self._show_job(visitor, before), *shelf]

    def _load_page(self, visitor: Visitor) -> list:
        return [demo.load_page(), "lighthouse"]

    def _load_reference(self, visitor: Visitor) -> list:
        return [python_reference()[:REFERENCE_CHARACTERS], "python reference"]

    def _load_upload(self, visitor: Visitor, path: str) -> list:
        if Path(path).stat().st_size > 4 * MOST_CHARACTERS:
            raise ValueError(
                f"text must have at most {MOST_CHARACTERS:,} characters, "
                "got a larger file: upload a part"
            )
        return [load_text(path), propose_name(Path(path).stem)]

    def _begin(self, visitor: Visitor, text: str, name: str, questions: float) -> list:
        visitor.begin(Job(name, text, int(questions)), self._model)
        return self._show_job(visitor, None)

    def _stop_reading(self, visitor: Visitor) -> gr.Button:
        if visitor.job is not None:
            visitor.job.stop.set()
        return gr.Button(interactive=False)

    def _go_to_ask(self, visitor: Visitor) -> list:
        memory = None if visitor.job is None else visitor.job.memory
        return [gr.Tabs(selected="ask"), *self._show_shelf(visitor, memory)]

    def _show_job(self, visitor: Visitor, before: Any) -> list:
        """Return the new values of the job's view; `before` is the state that the view shows."""
        job = visitor.job
        state = None
        shown = INTRODUCTION
        can_stop = False
        if job is not None:
            chunks = [len(phase_chunks) for phase_chunks in job.chunks.values()]
            state = (id(job), *chunks, len(job.exchanges))
            shown = _show_progress(job, self._model.jobs_before(job))
            can_stop = visitor.is_reading and not job.stop.is_set()
        details = [gr.skip(), gr.skip()]
        if job is not None and state != before:
            details = [_plot(job), _show_exchanges(job)]
        return [
            state,
            gr.Timer(active=visitor.is_reading),
            gr.Button(interactive=not visitor.is_reading),
            gr.Button(interactive=can_stop),
            shown,
            *details,
            gr.Button(visible=job is not None and job.memory is not None),
        ]

    # ------------------------------------------------------------------ asking

    def _connect_asking(self) -> None:
        outputs = [self._question, *self._chat_view]
        questions = [(self._question.submit, self._question)]
        questions += [(button.click, button) for button in self._samples]
        answers = []
        for trigger, question in questions:
            inputs = [self._memory, question, self._chats]
            answers.append(self._on(trigger, self._ask, inputs, outputs))
        # The end of an answer would bring the former conversation back.
        for trigger in (self._clear.click, self._memory.change):
            self._on(trigger, self._begin_chats, [], self._chat_view, cancels=answers)

    def _begin_chats(self, visitor: Visitor) -> list:
        return [[], [], [[], []]]

    def _ask(
        self, visitor: Visitor, name: str | None, question: str, chats: Chats
    ) -> Iterator[list]:
        if not question.strip():
            raise ValueError("question must not be empty: ask something")
        # The field's own limit holds in the browser alone.
        if len(question) > MOST_QUESTION_CHARACTERS:
            rule = f"question must have at most {MOST_QUESTION_CHARACTERS:,} characters"
            raise ValueError(f"{rule}, got {len(question):,}: shorten it")
        message = {"role": "user", "content": question.strip()}
        asked = [[*chat, message] for chat in chats]
        written: deque[list[str]] = deque([["", ""]], maxlen=1)
        future = self._model.ask(visitor.shelf, name or None, asked, written.append)
        # The field is emptied once: the next question may be typed meanwhile.
        field = ""
        while not future.done():
            waiting = "…" if future.running() else "Waiting: the model is busy."
            replies = _list_replies(written[0], waiting, name)
            yield [field, *map(_show_chat, _add_turns(asked, replies)), gr.skip()]
            field = gr.skip()
            time.sleep(0.1)
        if future.exception():
            yield [question, *map(_show_chat, chats), gr.skip()]
        answers = future.result()
        replies = _list_replies([answer.text for answer in answers], "(nothing)", name)
        if name == ROUTED:
            memories = ", ".join(answers[-1].memories)
            replies[-1]["head"] = f"[{memories or 'no memory'}]\n"
        if answers[-1].source is not None:
            replies[-1]["foot"] = f"\n\nSource: {answers[-1].source}"
        chats = _add_turns(asked, replies)
        yield [field, *map(_show_chat, chats), chats]

    # ------------------------------------------------------------------ the shelf

    def _connect_shelf(self) -> None:
        chosen, shelf = self._chosen, self._shelf_view
        # Others may have changed a shelf that is shared.
        for tab in (self._ask_tab, self._shelf_tab):
            self._on(tab.select, self._show_shelf, shelf, shelf)
        details = [self._about, self._new_name, self._confirm, self._delete, self._download]
        self._on(chosen.change, self._choose, [chosen], details)
        self._on(
            self._delete.click, self._ask_back, [chosen], [self._confirm, self._confirm_question]
        )
        self._on(self._cancel.click, self._keep, [], [self._confirm])
        self._on(self._confirmed.click, self._forget, shelf, shelf)
        self._on(self._new_name.submit, self._rename, [chosen, self._new_name], shelf)
        self._on(
            self._upload.upload, self._unpack, [self._upload], [self._upload, *shelf], "minimal"
        )
        self._on(self._download.click, self._pack, [chosen], [self._packed])

    def _show_shelf(
        self, visitor: Visitor, asked: str | None = None, chosen: str | None = None
    ) -> list:
        """Return the memories to ask and those on the shelf; each keeps its choice if it exists."""
        names = visitor.shelf.list()
        choices = [(name, name) for name in names]
        if names:
            choices.insert(0, ("the one that the question is about", ROUTED))
        if asked not in names:
            asked = ROUTED if names else None
        if chosen not in names:
            chosen = None
        labels = []
        for name in names:
            megabytes = visitor.shelf.bytes_of(name) / 1e6
            labels.append((f"{name}  ·  {megabytes:.1f} MB", name))
        return [gr.Dropdown(choices=choices, value=asked), gr.Radio(choices=labels, value=chosen)]

    def _choose(self, visitor: Visitor, chosen: str | None) -> list:
        return [
            _describe_chosen(visitor.shelf, chosen),
            gr.Textbox(chosen or "", visible=chosen is not None),
            gr.Row(visible=False),
            gr.Button(interactive=chosen is not None),
            gr.Button(interactive=chosen is not None),
        ]

    def _ask_back(self, visitor: Visitor, chosen: str) -> list:
        question = f"Delete <b>{escape(chosen)}</b>? It cannot be brought back."
        return [gr.Row(visible=True), question]

    def _keep(self, visitor: Visitor) -> gr.Row:
        return gr.Row(visible=False)

    def _forget(self, visitor: Visitor, asked: str | None, chosen: str) -> list:
        visitor.shelf.forget(chosen)
        return self._show_shelf(visitor, asked)

    def _rename(self, visitor: Visitor, chosen: str, name: str) -> list:
        name = visitor.shelf.rename(chosen, name)
        return self._show_shelf(visitor, name, name)

    def _unpack(self, visitor: Visitor, path: str) -> Iterator[list]:
        # The field is empty again, also where the memory is refused.
        yield [None, gr.skip(), gr.skip()]
        name = visitor.shelf.unpack(Path(path), propose_name(Path(path).stem), self._model.adopt)
        yield [None, *self._show_shelf(visitor, name, name)]

    def _pack(self, visitor: Visitor, chosen: str) -> gr.File:
        folder = visitor.shelf.find(chosen)
        for former in visitor.downloads.iterdir():
            former.unlink()
        archive = visitor.downloads / f"{folder.name}.zip"
        pack(folder, archive)
        return gr.File(str(archive), label="Ready to download", visible=True)


def _list_replies(texts: Sequence[str], waiting: str, name: str | None) -> list[dict[str, str]]:
    """Return the replies of both conversations; `waiting` stands for one that is empty."""
    shown = [text.strip() or waiting for text in texts]
    if not name:
        shown[1:] = ["Choose a memory to see its answer."]
    return [{"role": "assistant", "content": text} for text in shown]


def _add_turns(chats: Chats, turns: Sequence[dict[str, str]]) -> Chats:
    return [[*chat, turn] for chat, turn in zip(chats, turns, strict=True)]


def _show_chat(chat: list[dict[str, str]]) -> list[dict[str, str]]:
    """Return the turns of a conversation as they are shown: an answer between head and foot."""
    shown = []
    for turn in chat:
        content = turn.get("head", "") + turn["content"] + turn.get("foot", "")
        shown.append({"role": turn["role"], "content": content})
    return shown


def _show_progress(job: Job, jobs_before: int) -> str:
    """Return the progress of a reading: a bar for each phase, a line, and two figures."""
    phases = [name for name in PHASES if job.questions or name in job.chunks]
    current = ["waiting", *phases].index(job.phase)
    bars = ""
    for number, name in enumerate(phases, 1):
        share = float(number < current)
        style = "phase"
        if number == current:
            share = job.done / max(job.total, 1)
            style = "phase current"
        bar = f'<i><b style="width:{100 * share:.1f}%"></b></i>'
        bars += f'<div class="{style}">{bar}<span>{PHASES[name][0]}</span></div>'
    without, with_memory = job.curves
    # Both figures are of the same tokens.
    without = without[: len(with_memory) or None]
    figures = ""
    for style, line, points in zip(("without", "with"), LINES, (without, with_memory), strict=True):
        value = f"{points[-1][1]:.2f}" if points else "–"
        label = f"<span>perplexity so far, {line}</span>"
        figures += f'<div class="figure {style}"><b>{value}</b>{label}</div>'
    line = escape(_describe_job(job, jobs_before))
    return (
        f'<div class="phases">{bars}</div><p class="line">{line}</p>'
        f'<div class="figures">{figures}</div>'
    )


def _describe_job(job: Job, jobs_before: int) -> str:
    """Return one line: what happens, and for how long."""
    if job.ended:
        return _describe_ended(job)
    if job.phase == "waiting":
        if not jobs_before:
            return "Starting."
        noun = "reading" if jobs_before == 1 else "readings"
        return f"Waiting: {jobs_before} other {noun} first."
    if job.stop.is_set():
        return "Stopping after this step."
    title, unit = PHASES[job.phase]
    seconds = job.seconds_left
    if seconds is None:
        return f"{title}: the first step takes longest"
    left = f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
    return f"{title}: {job.done:,} of {job.total:,} {unit}, about {left} left in this step"


def _describe_ended(job: Job) -> str:
    if job.memory is None:
        if job.outcome == "Stopped":
            return "Stopped before anything was learned."
        return job.outcome
    line = f"{job.outcome}. The memory is on the shelf: {job.memory}."
    if job.outcome == "Done" and job.questions and not job.exchanges:
        line += " The model found nothing to ask itself."
    return line


def _plot(job: Job) -> gr.LinePlot:
    """Return the plot of the perplexity so far without and with the memory; hidden before any."""
    points = []
    for name, curve in zip(LINES, job.curves, strict=True):
        points += [(tokens, round(value, 2), name) for tokens, value in curve]
    if not points:
        return gr.LinePlot(visible=False)
    # The first chunks, which little is known about, would flatten the lines that follow.
    read = job.chunks["score"][-1].stop
    lowest = min(value for _, value, _ in points)
    highest = max(value for tokens, value, _ in points if 10 * tokens >= read)
    frame = pd.DataFrame(points, columns=["tokens read", "perplexity so far", "line"])
    return gr.LinePlot(frame, visible=True, y_lim=[0.9 * lowest, 1.1 * highest])


def _show_exchanges(job: Job) -> gr.HTML:
    """Return the exchanges of a self-study, the latest first."""
    if not job.exchanges:
        return gr.HTML(visible=False)
    items = ""
    for exchange in reversed(job.exchanges):
        items += f"<li><b>{escape(exchange.question)}</b> {escape(exchange.answer)}</li>"
    title = f"<h3>{len(job.exchanges)} questions that the model asked itself</h3>"
    return gr.HTML(f"{title}<ul class='exchanges'>{items}</ul>", visible=True)


def _describe_chosen(shelf: Library | None, chosen: str | None) -> str:
    """Return a line about the memory that is chosen on the shelf."""
    if shelf is None or chosen is None:
        return "<p class='line'>Choose a memory to rename, download or delete it.</p>"
    memory = describe_memory(shelf.find(chosen))
    layers = "an adapter"
    if memory["layers"]:
        layers = f"{memory['r']} slots beside each of {len(memory['layers'])} FFNs"
    size = f"{memory['parameters']:,} parameters, {memory['bytes'] / 1e6:.1f} MB"
    line = f"{layers} of {memory['base']}: {size}"
    return f"<p class='line'>{escape(line)}</p>"
