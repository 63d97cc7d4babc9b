"""Plot how active the neurons of an FFN of the embedded model are on a text, and the 64 that a memory clones.

python docs/figures/calibration.py
"""

import matplotlib.pyplot as plt
import torch
from drawing import HOST, MEMORY, save

from locas_peft import backbone
from locas_peft.text import python_reference, tokenize, unwrap

LAYER, R = 3, 64

model, tokenizer = backbone.load()
ids = tokenize(tokenizer, unwrap(python_reference()), max_tokens=512)[None]
seen: list[torch.Tensor] = []  # M [1, T, F], what the down projection gets
model.model.layers[LAYER].mlp.down_proj.register_forward_pre_hook(
    lambda module, args: seen.append(args[0])
)
with torch.no_grad():
    model(ids)
alpha = seen[0].abs().mean(dim=(0, 1)).sort(descending=True).values.numpy()

figure, axes = plt.subplots(figsize=(5.4, 3.0), layout="constrained")
axes.fill_between(range(len(alpha)), alpha, color=HOST, alpha=0.35, linewidth=0)
axes.fill_between(range(R), alpha[:R], color=MEMORY, linewidth=0)
axes.set(
    xlim=(0, len(alpha)), ylim=(0, None), xlabel=f"the {len(alpha)} neurons, sorted", ylabel="α"
)
axes.annotate(f"the {R} that are cloned", (R * 0.7, alpha[R // 2]), (R + 90, alpha[R // 8]), color=MEMORY, va="center",
              arrowprops={"arrowstyle": "-|>", "color": MEMORY})  # fmt: skip
axes.spines[["top", "right"]].set_visible(False)
save(figure, "calibration")
