"""Draw what merging and exporting do to an FFN.

python docs/figures/merging.py
"""

from drawing import HOST, MEMORY, PALE_MEMORY, arrow, box, canvas, save

figure, axes = canvas(5.4, 3.75)
LEFT, F, R, HEIGHT = 1.45, 2.3, 0.75, 0.55
MEMORY_STYLE = {"facecolor": PALE_MEMORY, "edgecolor": MEMORY, "color": MEMORY}


def draw_row(y: float, title: str, note: str, gap: float, extra: str, style: dict) -> None:
    """Draw the F neurons of an FFN and what stands `gap` to their right."""
    axes.text(0.1, y + HEIGHT / 2 + 0.12, title, va="center", weight="bold")
    axes.text(0.1, y + HEIGHT / 2 - 0.13, note, va="center", fontsize=10, color=HOST)
    box(axes, LEFT, y, F, HEIGHT, "F neurons")
    box(axes, LEFT + F + gap, y, R, HEIGHT, extra, size=10, **style)


draw_row(3.0, "adapter", "two modules", 0.2, "R slots", MEMORY_STYLE)
draw_row(1.65, "merged", "one module", 0.0, "R more", MEMORY_STYLE)
dashed = {"facecolor": "white", "edgecolor": HOST, "color": HOST, "linestyle": (0, (3, 2))}
draw_row(0.3, "exported", "base + LoRA", 0.0, "R zeros", dashed)
box(axes, LEFT + F + R + 0.2, 0.3, 0.62, HEIGHT, "LoRA\nrank R", size=10, **MEMORY_STYLE)

down, up = LEFT + 0.25, LEFT + F / 2 + 0.25
arrow(axes, (down, 2.93), (down, 2.27))
axes.text(down + 0.1, 2.7, "merge", va="center", fontsize=10)
axes.text(down + 0.1, 2.5, "up to rounding", va="center", fontsize=9, color=HOST)
arrow(axes, (up, 2.27), (up, 2.93))
axes.text(up + 0.1, 2.7, "unmerge", va="center", fontsize=10)
axes.text(up + 0.1, 2.5, "bit for bit", va="center", fontsize=9, color=HOST)
right = LEFT + F + 0.2 + R / 2 + 0.62
axes.plot([LEFT + F + 0.2 + R, right], [3.275, 3.275], color=MEMORY, linewidth=1.4)
arrow(axes, (right, 3.275), (right, 0.92), MEMORY)
axes.text(right - 0.08, 1.25, "locas export", ha="right", va="center", fontsize=10, color=MEMORY)
save(figure, "merging")
