"""The tables of the paper (arXiv:2602.05085), on any host: `benchmarks/paper.py` fills them.

Each table has two functions: `fill(bench)` makes the results that do not exist, and
`tabulate(bench)` returns its Markdown from those that do.
"""
