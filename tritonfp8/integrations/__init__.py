"""Programs that train models, such as Hugging Face's Trainer: FP8 in one line of each.

Each module is imported by its name, and needs the library that it is named after.
"""
