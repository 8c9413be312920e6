"""The C modules through which Triton starts kernels, built before they are needed; imports Triton.

Triton 3.6 makes one for each signature of a kernel, with the system's C compiler, when a kernel is first launched:
that takes as long as compiling a small kernel. They are the same for all GPUs and need none to be built. What they do
not need to be built is CUDA's own library either: where it is missing, an empty one stands in for the linker.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from triton.backends.nvidia import driver
from triton.runtime import build
from triton.runtime.cache import get_cache_manager


def launcher_source(signature: Mapping[str, Any]) -> str | None:
    """C source of what starts kernels with these parameter types; None when this Triton does not make any, or when
    they depend on more (tensor descriptors)."""
    if any(isinstance(kind, str) and kind.startswith("tensordesc") for kind in signature.values()):
        return None
    make = getattr(driver, "make_launcher", None)
    return None if make is None else str(make({}, dict(signature), None))


def build_launcher(source: str) -> None:
    """Into Triton's cache, unless it is there."""
    _build("__triton_launcher", source)


def build_driver() -> None:
    """The module with which Triton talks to the driver."""
    _build("cuda_utils", Path(driver.dirname, "driver.c").read_text(encoding="utf-8"))


def _build(name: str, source: str) -> None:
    # As `triton.runtime.build.compile_module_from_src` does it, without loading the result.
    key = hashlib.sha256((source + build.platform_key()).encode("utf-8")).hexdigest()
    cache = get_cache_manager(key)
    file = f"{name}{sysconfig.get_config_var('EXT_SUFFIX')}"
    if cache.get_file(file) is not None:
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"{name}.c")
        path.write_text(source, encoding="utf-8")
        built = build._build(
            name, str(path), folder, _library_folders(folder), driver.include_dirs, driver.libraries, []
        )
        cache.put(Path(built).read_bytes(), file, binary=True)


def _library_folders(folder: str) -> list[str]:
    try:
        return list(driver.library_dirs())
    except (AssertionError, OSError, subprocess.SubprocessError):
        return [driver.libdevice_dir, _stand_in(folder)]


def _stand_in(folder: str) -> str:
    """A folder with a ``libcuda.so.1`` that the linker takes for the real one; symbols are looked up at run time."""
    place = Path(folder, "stand_in")
    place.mkdir()
    source = place / "empty.c"
    source.write_text("", encoding="utf-8")
    words = ["-shared", "-Wl,-soname,libcuda.so.1", "-o", str(place / "libcuda.so.1"), str(source)]
    subprocess.run([_c_compiler(), *words], check=True)  # noqa: S603 - no shell, words of our own
    return str(place)


def _c_compiler() -> str:
    found = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if found is None:
        raise RuntimeError("no C compiler was found, which Triton needs: install gcc, or name one by CC")
    return found
