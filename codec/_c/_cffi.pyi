"""What type checkers see of the module that bindings/cffi/build.py writes when the package is built."""

from typing import Any

ffi: Any
