"""Access to the C library: its functions, constants and structs, and the threads that call it."""

from pathlib import Path

try:
    from codec._c import _cffi
except ModuleNotFoundError:  # raised if the package cffi itself is missing
    raise
except ImportError as e:
    raise ImportError(
        f"codec is not built in {Path(__file__).parents[2]}: run `pip install -e .` there, "
        "or start Python in another folder to import the installed package"
    ) from e

PACKAGE = Path(_cffi.__file__).parents[1]  # folder of the built package, with the subfolders lib, include and kernels
