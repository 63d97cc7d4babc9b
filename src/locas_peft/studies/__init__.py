"""The protocols as they are run: methods learn, `evaluation` measures, and what came out lies in a folder as JSON."""
