"""An engine of vLLM's, driven by lines: run by the interpreter of an environment that has vLLM.

Its one argument is a JSON object, what ``LLM`` is made with. Each line on stdin is a JSON object with ``do``, and is
answered by one on stdout. ``{"do": "generate", "requests": […]}`` has all of them computed at once, greedily;
``{"do": "reset"}`` empties the engine's own prefix cache, which it refuses while a connector holds blocks;
``{"do": "tokenize", "text": …}`` returns token ids. ``ready`` comes first. Times are in seconds by the system's
monotonic clock, of first tokens by the engine core's word. Knows nothing of kvferry.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import sys
import time
from typing import Any

RESET_S = 60.0
LOOK_S = 0.001


class Driver:
    """One engine, in vLLM's default mode: its core is a process of its own."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        vllm = importlib.import_module("vllm")
        transfer = arguments.pop("kv_transfer_config", None)
        if transfer is not None:
            config = importlib.import_module("vllm.config")
            arguments["kv_transfer_config"] = config.KVTransferConfig(**transfer)
        self._params = vllm.SamplingParams
        self._llm: Any = vllm.LLM(**arguments)
        self._engine: Any = self._llm.llm_engine
        self._names = map("bench-{}".format, itertools.count())

    def generate(self, requests: list[dict[str, Any]]) -> dict[str, Any]:
        """Compute requests; each has ``prompt``, ``new`` and ``params``, which its connector gets, and may be None."""
        names, asked_at = [], []
        for one in requests:
            params = self._params(
                temperature=0,
                max_tokens=one["new"],
                ignore_eos=True,
                extra_args={"kv_transfer_params": one["params"]} if one.get("params") else None,
            )
            name = next(self._names)
            asked_at.append(time.monotonic())
            self._engine.add_request(name, {"prompt_token_ids": one["prompt"]}, params)
            names.append(name)
        finished: dict[str, Any] = {}
        while len(finished) < len(names):
            finished.update({one.request_id: one for one in self._engine.step() if one.finished})
        return {"replies": [_reply(finished[name], at) for name, at in zip(names, asked_at, strict=True)]}

    def reset(self) -> dict[str, Any]:
        """Empty the engine's own prefix cache, once no block is held any more."""
        ends_at = time.monotonic() + RESET_S
        while not self._llm.reset_prefix_cache():
            if time.monotonic() > ends_at:
                raise TimeoutError(f"blocks are held for {RESET_S:.0f} s after the last request")
            time.sleep(LOOK_S)
        return {"at": time.monotonic()}

    def tokenize(self, text: str) -> dict[str, Any]:
        """Return a text's token ids."""
        return {"tokens": self._llm.get_tokenizer().encode(text)}


def _reply(output: Any, asked_at: float) -> dict[str, Any]:  # noqa: ANN401  vLLM's RequestOutput
    return {
        "asked_at": asked_at,
        "scheduled_at": output.metrics.scheduled_ts,
        "first_token_at": output.metrics.first_token_ts,
        "tokens": list(output.outputs[0].token_ids),
        "ended_by": output.outputs[0].finish_reason,
        "params": output.kv_transfer_params,
    }


def main(arguments: str) -> None:
    """Serve lines until there is no more."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM logs to it, and so do its processes
    driver = Driver(json.loads(arguments))
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = getattr(driver, command.pop("do"))(**command)
        except TimeoutError as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
