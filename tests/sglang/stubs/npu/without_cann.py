"""torch_npu on the simulated CANN, and what SGLang imports of it that needs more of CANN than is simulated.

``torchair`` is in torch_npu's wheel, but loads CANN's graph engine; SGLang imports a back end of it for a torch.compile
that is off on NPUs. ``transfer_to_npu`` makes torch.cuda mean torch.npu, and after it torch 2.13's dynamo, which models
import, cannot be imported; of what it does, events and streams are enough.
"""

from __future__ import annotations

import sys
import types
from typing import Any, NoReturn

import torch
import torch_npu
import torch_npu.contrib


def _never(*_: object, **__: object) -> NoReturn:
    raise NotImplementedError("torchair's back end")


def _module(name: str, **members: Any) -> None:  # noqa: ANN401  whatever SGLang takes from it
    module = sys.modules[name] = types.ModuleType(name)
    module.__path__ = []
    vars(module).update(members)


_module("torchair", get_npu_backend=lambda compiler_config=None: _never)  # noqa: ARG005  SGLang names it
_module("torchair.configs")
_module(
    "torchair.configs.compiler_config",
    CompilerConfig=lambda: types.SimpleNamespace(debug=types.SimpleNamespace()),
)
_GE = "torchair.ge_concrete_graph"
for _name in ("", ".ge_converter", ".ge_converter.experimental"):
    _module(_GE + _name)
_module(f"{_GE}.ge_converter.experimental.patch_for_hcom_allreduce")
_module("torch_npu.contrib.transfer_to_npu")
torch_npu.contrib.transfer_to_npu = sys.modules["torch_npu.contrib.transfer_to_npu"]

torch.npu.set_device(0)  # SGLang's arguments ask for the device's memory before any device is set
for _name in ("Event", "Stream", "current_stream", "stream", "synchronize"):
    setattr(torch.cuda, _name, getattr(torch.npu, _name))
