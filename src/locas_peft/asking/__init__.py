"""Ask a model: prompts and chat templates, continuations in batches, answers, recitation."""
