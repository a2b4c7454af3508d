"""The rules of the layout, as functions from modules to violations. They read the source and run none of it.

``python -m tests.architecture`` checks the package without torch, whose import takes longer than all rules.
"""

from .code_rules import (
    FORMAT_NAMES,
    device_violations,
    environment_violations,
    format_violations,
    frozen_violations,
    inverse_scale_violations,
    kernel_violations,
    pickle_violations,
    private_violations,
    schema_violations,
    stride_violations,
)
from .import_rules import export_violations, hidden_violations, import_violations, string_violations
from .modules import LAYERS, ROOT, Module, imported_modules, modules_below, package
from .size_rules import (
    class_name_violations,
    folder_violations,
    room_violations,
    size_violations,
    total_violations,
)

RULES = (
    import_violations, string_violations, hidden_violations, folder_violations, kernel_violations, device_violations,
    stride_violations, format_violations, inverse_scale_violations, environment_violations, pickle_violations,
    private_violations, frozen_violations, size_violations, class_name_violations,
)  # fmt: skip
RULES_OF_ALL = (folder_violations, size_violations)
"""The rules that tests, bench and docs keep, too."""


def violations(rule, others=()):
    """What breaks a rule in the package, and in other modules if the rule is one of all. Kernels may be long."""
    modules = [*package(), *(others if rule in RULES_OF_ALL else ())]
    return rule([module for module in modules if rule is not size_violations or not module.is_kernel])


__all__ = [
    "FORMAT_NAMES", "LAYERS", "ROOT", "RULES", "RULES_OF_ALL", "Module", "class_name_violations",
    "device_violations", "environment_violations", "export_violations", "folder_violations", "format_violations",
    "frozen_violations", "hidden_violations", "import_violations", "imported_modules", "inverse_scale_violations",
    "kernel_violations",
    "modules_below", "package", "pickle_violations", "private_violations", "room_violations", "schema_violations",
    "size_violations", "stride_violations", "string_violations", "total_violations", "violations",
]  # fmt: skip
