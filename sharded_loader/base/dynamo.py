"""`torch.compile` leaves this library's code alone: a loop over a loader may stand in a compiled function.

    leave_alone(function, ...)     Dynamo, once it is imported, neither compiles these functions nor what they call
    end_compiling()                in a forked worker: nothing is compiled here

Dynamo would otherwise compile the engine, and what the engine calls: the dataset, and in forked workers, which inherit
Dynamo's hook, everything that they do (100 times slower). Nothing here imports torch.
"""

from __future__ import annotations

import sys
from types import FunctionType
from typing import Any

from sharded_loader.base.imports import call_after_import

_alone: list[FunctionType] = []


def leave_alone(*functions: Any) -> None:
    """See to it that Dynamo does not compile these functions of ours, nor what they call.

    Other functions of this library are not compiled either, but what they call may be. Before torch 2.7, so may what
    these call.
    """
    _alone.extend(functions)
    call_after_import("torch._dynamo", _tell_dynamo)


def _tell_dynamo() -> None:
    sys.modules["torch._dynamo"].trace_rules.add("sharded_loader")
    hook: Any = sys.modules["torch._C._dynamo.eval_frame"]
    if hasattr(hook, "set_code_exec_strategy"):
        skip = hook._FrameExecStrategy(hook._FrameAction.SKIP, hook._FrameAction.SKIP)
        for function in _alone:
            hook.set_code_exec_strategy(function.__code__, skip)


def end_compiling() -> None:
    """Take Dynamo's hook out of this thread, which has inherited it by a fork."""
    hook: Any = sys.modules.get("torch._C._dynamo.eval_frame")
    if hook is not None:
        hook.set_eval_frame(None)
