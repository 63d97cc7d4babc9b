"""Perplexity as a metric of Hugging Face `evaluate`.

Made directly, not by `evaluate.load`, it needs no network.
The extra `eval` has `evaluate` and `datasets`.
"""

import math
from typing import Any

from ..checks import import_extra
from ..ttt.chunks import perplexity

evaluate = import_extra("evaluate")
datasets = import_extra("datasets")
Metric: Any = evaluate.Metric

__all__ = ["Perplexity"]


class Perplexity(Metric):
    """exp(sum of nll / number of scored tokens) over the records of chunks, accumulated in float64.

    Predictions are the chunks' `nll_nats`; references are their numbers of scored `tokens`.
    """

    def __init__(self, **options: Any):
        # The pairs of one process need no file.
        super().__init__(**{"keep_in_memory": options.get("num_process", 1) == 1, **options})

    def _compute(self, predictions: list[float], references: list[int]) -> dict[str, float]:
        tokens = sum(references)
        return {"perplexity": perplexity(math.fsum(predictions), tokens), "scored_tokens": tokens}

    def _info(self) -> Any:
        columns = {"predictions": datasets.Value("float64"), "references": datasets.Value("int64")}
        text = self.__doc__ or ""
        return evaluate.MetricInfo(
            description=text,
            citation="Locas, arXiv:2602.05085",
            features=datasets.Features(columns),
            inputs_description=text,
            module_name="perplexity",
        )
