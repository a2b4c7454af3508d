"""Sizes of folders, files and functions."""

import ast
from collections import Counter

MAX_FILES, MAX_FILE_LINES, MAX_FUNCTION_LINES = 12, 400, 60


def folder_violations(modules):
    """Folders of more files than one can keep in view, or that do not say what they are for."""
    violations = []
    files = Counter(module.folder for module in modules)
    packages = {module.name: module for module in modules if module.is_package}
    for folder, count in files.items():
        if count > MAX_FILES:
            violations.append(f"{folder} has {count} files, more than {MAX_FILES}")
        if folder in packages and not ast.get_docstring(packages[folder].tree):
            violations.append(f"{folder} has no docstring that says what it is for")
    return violations


def size_violations(modules):
    violations = []
    for module in modules:
        if (lines := len(module.source.splitlines())) > MAX_FILE_LINES:
            violations.append(f"{module.name} has {lines} lines")
        for node in module.nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = node.end_lineno - node.lineno + 1
                if lines >= MAX_FUNCTION_LINES:
                    violations.append(f"{module.name}:{node.lineno} {node.name} has {lines} lines")
    return violations
