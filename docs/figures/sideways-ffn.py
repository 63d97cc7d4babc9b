"""Draw the memory beside an FFN.

python docs/figures/sideways-ffn.py
"""

from drawing import HOST, INK, MEMORY, PALE_MEMORY, arrow, box, canvas, save
from matplotlib.patches import Circle

figure, axes = canvas(5.4, 4.55)


def draw_ffn(
    left: float, width: float, neurons: int, letter: str, title: str, colour: str, fill: dict
) -> None:
    """Draw gate and up, a row of neurons, and down, from the bottom to the top."""
    middle = left + width / 2
    box(axes, left, 1.0, width, 2.75, facecolor="none", edgecolor=colour, linestyle=(0, (4, 3)))
    axes.text(middle, 3.47, title, ha="center", fontsize=11, color=colour, weight="bold")
    box(
        axes,
        left + 0.12,
        1.15,
        width - 0.24,
        0.48,
        f"gate, up  [{letter} × D]",
        size=10,
        edgecolor=colour,
        **fill,
    )
    step = (width - 0.5) / (neurons - 1)
    for neuron in range(neurons):
        axes.add_patch(
            Circle((left + 0.25 + neuron * step, 2.05), 0.085, facecolor=colour, edgecolor="none")
        )
    axes.text(
        middle,
        2.33,
        f"{letter} neurons" if letter == "F" else f"{letter} slots",
        ha="center",
        fontsize=10,
    )
    box(
        axes,
        left + 0.12,
        2.78,
        width - 0.24,
        0.48,
        f"down  [D × {letter}]",
        size=10,
        edgecolor=colour,
        **fill,
    )
    for bottom, top in ((1.63, 1.93), (2.52, 2.77)):
        arrow(axes, (middle, bottom), (middle, top), colour)


draw_ffn(0.3, 2.75, 12, "F", "the model's FFN, frozen", HOST, {})
draw_ffn(3.4, 1.7, 4, "R", "the memory", MEMORY, {"facecolor": PALE_MEMORY})

host, memory, plus = 1.675, 4.25, 4.25
axes.text(host, 0.2, "A, the FFN's input", ha="center", va="center")
arrow(axes, (host, 0.34), (host, 1.0))
axes.plot([host, memory], [0.62, 0.62], color=INK, linewidth=1.4)
axes.plot(host, 0.62, "o", color=INK, markersize=4)
arrow(axes, (memory, 0.62), (memory, 1.0), MEMORY)
axes.text(memory + 0.1, 0.77, "× k", fontsize=11, color=MEMORY, va="center")

axes.add_patch(Circle((host, plus), 0.15, facecolor="white", edgecolor=INK, linewidth=1.4))
axes.text(host, plus - 0.005, "+", ha="center", va="center", fontsize=14)
arrow(axes, (host, 3.75), (host, plus - 0.15))
axes.plot([memory, memory], [3.75, plus], color=MEMORY, linewidth=1.4)
arrow(axes, (memory, plus), (host + 0.15, plus), MEMORY)
axes.text((host + memory) / 2, plus + 0.1, "× τ", fontsize=11, color=MEMORY, ha="center")
arrow(axes, (host - 0.15, plus), (0.75, plus))
axes.text(0.7, plus, "output", ha="right", va="center", fontsize=10)
save(figure, "sideways-ffn")
