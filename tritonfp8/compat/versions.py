"""The versions of torch and triton that this package works with; importing it with others is an error."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

from packaging.version import Version

TRITON_OF_TORCH: Mapping[str, str] = {"2.11": "3.6", "2.12": "3.7", "2.13": "3.7", "2.14": "3.8", "2.15": "3.9"}
"""The triton that each torch was built for. The tests ran with these pairs, and with nothing newer."""


def supported(versions: Mapping[str, str] = TRITON_OF_TORCH) -> str:
    """The pairs as text, such as ``torch 2.11 with triton 3.6, ...``."""
    return ", ".join(f"torch {torch} with triton {triton}" for torch, triton in versions.items())


def _minor(version: str) -> str:
    return "{}.{}".format(*(*Version(version).release, 0)[:2])


def _require(name: str, version: str, known: list[str]) -> None:
    minor = Version(_minor(version))
    oldest, newest = known[0], known[-1]
    if Version(oldest) <= minor <= Version(newest):
        return
    age = "older" if minor < Version(oldest) else "newer"
    major, _, last = newest.partition(".")
    raise ImportError(
        f"tritonfp8 works with {supported()}; found {name} {version}, which is {age} than any of these. "
        f"Install one of them: pip install '{name}>={oldest},<{major}.{int(last) + 1}'"
    )


def check(torch: str, triton: str | None) -> None:
    """Check a pair of versions, and warn if each is known but torch was built for another triton.

    Args:
        torch: version of torch.
        triton: version of triton, None where it is not installed.

    Raises:
        ImportError: triton is not installed, or one of them is older or newer than any that was tried.
    """
    _require("torch", torch, list(TRITON_OF_TORCH))
    wanted = TRITON_OF_TORCH[_minor(torch)]
    if triton is None:
        raise ImportError(
            f"tritonfp8 needs triton, which torch {torch} did not bring (builds for CPU do not). "
            f"Install it: pip install 'triton=={wanted}.*'"
        )
    _require("triton", triton, list(dict.fromkeys(TRITON_OF_TORCH.values())))
    if _minor(triton) != wanted:
        warnings.warn(
            f"torch {torch} was built for triton {wanted}; found triton {triton}. The kernels of tritonfp8 compile "
            f"with it, but torch.compile may fail. Install the other one: pip install 'triton=={wanted}.*'",
            stacklevel=2,
        )


def triton_since(version: str) -> bool:
    """Whether the installed triton is of this version or a later one."""
    import triton

    return Version(triton.__version__) >= Version(version)


def _check_installed() -> None:
    import torch

    try:
        import triton
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        check(torch.__version__, None)
    else:
        check(torch.__version__, triton.__version__)


_check_installed()
