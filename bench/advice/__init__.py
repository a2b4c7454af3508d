"""``tritonfp8.advise`` tried on public models: its predictions beside the whole models, measured."""
