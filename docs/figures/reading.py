"""Draw test-time training: each chunk is scored first and learned second.

python docs/figures/reading.py
"""

from drawing import HOST, INK, MEMORY, PALE_HOST, PALE_MEMORY, arrow, box, canvas, save

figure, axes = canvas(5.4, 4.2)
CHUNK, LEFT, CHUNKS = 0.52, 0.15, 6

for row, (chunk, top) in enumerate(((2, 3.45), (3, 2.25), (4, 1.05))):
    for index in range(CHUNKS):
        if index == chunk:
            style, colour = {"facecolor": MEMORY, "edgecolor": MEMORY}, "white"
        elif index == chunk - 1:
            style, colour = {"facecolor": "#b0bec5"}, INK
        else:
            style, colour = (
                {"facecolor": "white", "edgecolor": PALE_HOST if index > chunk else "#cfd8dc"},
                "#90a4ae",
            )
        box(axes, LEFT + index * CHUNK, top, CHUNK - 0.05, 0.36, str(index), color=colour, **style)
    begin, end = LEFT + (chunk - 1) * CHUNK, LEFT + (chunk + 1) * CHUNK - 0.05
    axes.plot(
        [begin, begin, end, end],
        [top - 0.06, top - 0.12, top - 0.12, top - 0.06],
        color=HOST,
        linewidth=1.2,
    )
    if row == 0:
        axes.text(
            (begin + end) / 2,
            top - 0.3,
            "window",
            ha="center",
            va="center",
            fontsize=10,
            color=HOST,
        )
        axes.text(begin + 0.2, top + 0.5, "context", ha="center", fontsize=10, color=HOST)
        axes.text(
            begin + 0.82, top + 0.5, "chunk", ha="center", fontsize=10, color=MEMORY, weight="bold"
        )
    memory, middle = 4.2, top + 0.18
    box(
        axes,
        memory,
        top - 0.02,
        1.0,
        0.4,
        f"memory {chunk}",
        facecolor=PALE_MEMORY,
        edgecolor=MEMORY,
        size=10,
    )
    right = LEFT + CHUNKS * CHUNK
    arrow(axes, (memory, middle), (right + 0.02, middle), INK)
    axes.text((memory + right) / 2 - 0.02, middle + 0.1, "1 score", ha="center", fontsize=10)
    arrow(axes, (memory + 0.5, top - 0.02), (memory + 0.5, top - 0.8), MEMORY)
    axes.text(memory + 0.42, top - 0.42, "2 learn\nchunk " + str(chunk), ha="right", va="center", fontsize=10,
              color=MEMORY)  # fmt: skip
axes.text(4.7, 0.08, "…", ha="center", fontsize=14, color=MEMORY)
axes.text(LEFT, 0.3, "Each score is that of unseen text.", fontsize=10)
save(figure, "reading")
