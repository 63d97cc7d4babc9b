"""The tables of the paper (arXiv:2602.05085), on any host: `benchmarks/paper.py` fills them.

Each table is a module with three functions. `fill(bench)` makes the results that do not exist,
`tabulate(bench)` returns its Markdown from those that do, and `estimate(bench)` counts the tokens
that `fill` feeds, in tokens that are learned.
"""
