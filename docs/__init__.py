"""Pages for users, and the code that makes their tables and figures: ``python -m docs.build``."""
