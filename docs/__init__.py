"""Pages for users, and the code that makes what they show: ``python -m docs.build``."""
