"""save: files that are whole or absent.

together    files that one process writes, or the first of the ranks that share a model
as_loaded   a model that was loaded, in the format of its checkpoint
saving      save: an export, or a model as it was loaded
"""

from tritonfp8.export.writing.saving import save
from tritonfp8.export.writing.together import attempt, settled

__all__ = ["attempt", "save", "settled"]
