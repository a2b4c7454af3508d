"""Lets the collector of garbage rest in the process that imports this module, best before any other.

It else looks at all modules again and again: a fifth of the time to import them, a seventh of the interpreter's, and
6 % of Dynamo's. Processes forked from this one inherit it.
"""

import gc

gc.set_threshold(50_000, 20, 100)
