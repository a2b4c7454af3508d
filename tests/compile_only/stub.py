"""A process in which launches go to a stub of the CUDA driver: how to start it, and what it patches first."""

import os
import re
import subprocess
from pathlib import Path
from unittest import mock

HERE = Path(__file__).parent


def environment(folder):
    """The environment of such a process; builds the stub into ``folder``, by gcc."""
    from triton.backends.nvidia import driver

    library = Path(folder) / "libcuda.so.1"
    include = Path(driver.__file__).parent / "include"
    subprocess.run(
        ["gcc", "-O1", "-shared", "-fPIC", f"-I{include}", "-o", library, HERE / "stub_driver.c"], check=True
    )
    found = {**os.environ, "LD_LIBRARY_PATH": str(folder), "TRITON_LIBCUDA_PATH": str(folder)}
    # Nothing runs what is compiled.
    return found | {
        "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(Path(folder) / "cache"), "DISABLE_LLVM_OPT": "1"
    }  # fmt: skip


def patch():
    """Have torch and Triton take the stub for an H200. Before the first import of the package that launches."""
    import torch
    from triton.backends.nvidia import compiler, driver

    torch.cuda.is_available = lambda: True
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    torch.cuda.is_current_stream_capturing = lambda: False
    torch._C._cuda_getCurrentRawStream = lambda index: 0
    driver.CudaDriver.is_active = staticmethod(lambda: True)
    _end_at_memory(compiler)
    compiler.CUDABackend.make_ptx = lambda self, text, metadata, *args: _named(text, metadata)
    compiler.CUDABackend.make_cubin = lambda *args: b"no machine code"


def _end_at_memory(compiler):
    """Have the compiler end where a kernel's memory is allocated: code takes longer, and the stub reads none."""
    passes, own = compiler.passes, compiler.nvidia.passes
    code = {
        own.ttgpuir: ["add_to_llvmir"],
        own.ttnvgpuir: ["add_nvgpu_to_llvm", "add_warp_specialize_to_llvm"],
        passes.convert: ["add_nvvm_to_llvm"],
        passes.llvmir: ["add_di_scope"],
        compiler.nvidia: ["set_short_ptr", "set_nvvm_reflect_ftz", "has_extern_deps"],
    }
    for module, names in code.items():
        for name in names:
            setattr(module, name, lambda *args: None)
    compiler.llvm = mock.MagicMock()
    compiler.llvm.to_module = lambda module, context: str(module)


def _named(text, metadata):
    """Note the name of the only kernel of a module: the public function."""
    (metadata["name"],) = re.findall(r"^ *tt\.func public @(\w+)", text, re.MULTILINE)
    return "no PTX"


def patch_abilities(hardware):
    """Have a package take its tensors for tensors on an H200."""
    h200 = hardware.Abilities("stub", (9, 0), True, True, True, True, True, False, 132, 232448)
    hardware.abilities = lambda device: h200
