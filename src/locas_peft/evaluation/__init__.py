"""Measures that consume losses and answers, and know no adapter: one module a protocol."""
