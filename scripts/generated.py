"""The files that a build generates, as kernel-builder does: one ops namespace a build, so that several can be loaded at once."""

# What kernel-builder puts beside the sources. The binding includes it and nothing else does, so a new id compiles one file.
REGISTRATION_H = """\
#pragma once
#include <Python.h>
#define TORCH_EXTENSION_NAME {ops_name}
#define STABLE_TORCH_LIBRARY_EXPAND(name, ops) STABLE_TORCH_LIBRARY(name, ops)
#define STABLE_TORCH_LIBRARY_IMPL_EXPAND(name, device, ops) STABLE_TORCH_LIBRARY_IMPL(name, device, ops)
// Lets Python import the library; loading it registers the ops.
#define REGISTER_EXTENSION(name) REGISTER_EXTENSION_(name, #name)
#define REGISTER_EXTENSION_(name, text)                                                      \\
  PyMODINIT_FUNC PyInit_##name() {{                                                           \\
    static PyModuleDef module = {{PyModuleDef_HEAD_INIT, text, nullptr, 0, nullptr}};          \\
    return PyModule_Create(&module);                                                         \\
  }}
"""

OPS_PY = """\
import torch

from . import {ops_name}

ops = torch.ops.{ops_name}


def add_op_namespace_prefix(op_name: str):
    return f"{ops_name}::{{op_name}}"
"""

# Old releases of `kernels` look for the module one folder down.
COMPAT_PY = """\
import importlib.util
import sys
from pathlib import Path

_spec = importlib.util.spec_from_file_location("{ops_name}_compat", Path(__file__).parent.parent / "__init__.py")
_module = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = _module
_spec.loader.exec_module(_module)
globals().update({{name: value for name, value in vars(_module).items() if not name.startswith("__")}})
__all__ = _module.__all__
"""
