"""The rules that a plot compares: dynamic evaluation is the paper's update."""

import torch
from torch import nn


def test_dynamic_evaluation_divides_by_the_root_mean_square_and_pulls_to_the_first_weights(
    load_benchmark,
):
    weight = nn.Parameter(torch.tensor([1.0, 2.0]))
    rule = load_benchmark("rules").DynamicEvaluation([weight], lr=0.0, decay=0.25)
    for gradient in (
        [3.0, 0.0],
        [3.0, 4.0],
    ):  # another text's: roots of the mean squares 3 and sqrt(8)
        weight.grad = torch.tensor(gradient)
        rule.step()
    assert weight.tolist() == [1.0, 2.0]
    rule.param_groups[0]["lr"], weight.grad = 0.5, torch.tensor([1.0, -1.0])
    rule.step()
    roots = torch.tensor([3.0, 8.0**0.5])
    stepped = torch.tensor([1.0, 2.0]) - 0.5 * torch.tensor([1.0, -1.0]) / (roots + roots.mean())
    pulled = 0.25 * (torch.tensor([1.0, 2.0]) - stepped) * roots / roots.mean()
    torch.testing.assert_close(weight.detach(), stepped + pulled)
