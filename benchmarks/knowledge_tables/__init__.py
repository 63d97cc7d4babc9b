"""What a memory knows of texts that no one here wrote: `benchmarks/knowledge.py` fills the tables.

Each table has two functions: `fill(bench)` makes the results that do not exist, and
`tabulate(bench)` returns its Markdown from those that do.
"""
