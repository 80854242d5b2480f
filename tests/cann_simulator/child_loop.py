"""Run each line of the standard input, a JSON string of Python code, in one namespace; answer with its ``result``."""

from __future__ import annotations

import json
import os
import sys
import traceback
from typing import Any

answers = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)
space: dict[str, Any] = {}
for line in sys.stdin:
    space["result"] = None
    answer: dict[str, Any]
    try:
        exec(compile(json.loads(line), "<test>", "exec"), space)  # noqa: S102  that is what it is for
        answer = {"result": space["result"]}
    except Exception as error:  # noqa: BLE001  whatever the code raises is the answer
        answer = {"error": type(error).__name__, "text": str(error), "trace": traceback.format_exc()}
    print(json.dumps(answer), file=answers)
os._exit(0)
