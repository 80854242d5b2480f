"""The demo's reference: plain greedy ``generate()`` of the same model, one prompt after another."""

from __future__ import annotations

import time

import torch

from examples.demo.engine import arguments
from examples.demo.messages import Done, Ready, notify, read_prompts
from examples.demo.model import load_model


def main() -> None:
    """Answer the router's prompts until there are no more."""
    options = arguments()
    started = time.monotonic()
    model = load_model(options.model, options.threads)
    notify(Ready(load_s=time.monotonic() - started))
    for prompt in read_prompts():
        begun = time.monotonic()
        ids = torch.tensor([prompt.tokens])
        with torch.inference_mode():
            output = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=prompt.max_new_tokens,
                do_sample=False,
                eos_token_id=model.config.eos_token_id,
                pad_token_id=model.config.eos_token_id,
            )
        tokens = tuple(output[0, len(prompt.tokens) :].tolist())
        notify(Done(request_id=prompt.request_id, decode_s=time.monotonic() - begun, tokens=tokens))


if __name__ == "__main__":
    main()
