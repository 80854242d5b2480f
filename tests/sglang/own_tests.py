"""SGLang's own tests that are in its package, over kvferry and on a CPU: ``python -m unittest tests.sglang.own_tests``.

Of each only options, models and the lengths of prompts are ours. MODEL, MLA_MODEL and KVFERRY_RUNTIME_DIR say where
the models and the daemon are; ``python3`` and ``sglang`` on PATH must be this environment's: see test_commands.py.
"""

from __future__ import annotations

import os
from functools import partial
from http import HTTPStatus
from typing import Any, Final

from sglang.test import kl_multiturn_utils
from sglang.test.kits.pause_generation_kit import PauseResumeInPlaceMixin
from sglang.test.kits.pd_parity_kit import PDLogprobParityMixin
from sglang.test.kits.unified_radix_cache_kit import UnifiedRadixTreeTestMixin
from sglang.test.manual.disaggregation import (
    test_chunked_prefill_abort,
    test_disaggregation_chunked_prefill_abort,
    test_disaggregation_peer_liveness_abort,
)
from sglang.test.server_fixtures.disaggregation_fixture import PDDisaggregationServerBase
from sglang.test.test_utils import (
    DEFAULT_TIMEOUT_FOR_SERVER_LAUNCH,
    DEFAULT_URL_FOR_TEST,
    CustomTestCase,
    popen_launch_server,
    terminate_and_kill_process_tree,
)

from tests.kit.servers import prompt
from tests.sglang.servers import DECODE_OPTIONS, OPTIONS, hicache

MODEL: Final = os.environ.get("MODEL", "")
MLA_MODEL: Final = os.environ.get("MLA_MODEL", "")
PAGE_SIZE: Final = ["--page-size", "64"]
BOTH: Final = [*OPTIONS, *DECODE_OPTIONS, *PAGE_SIZE, "--max-total-tokens", "16384"]


def _launch(launch: Any, *arguments: object, other_args: list[str], **more: object) -> Any:  # noqa: ANN401  SGLang's
    """Launch a server as SGLang's helper does, on a CPU."""
    return launch(*arguments, other_args=[*other_args, *OPTIONS, "--max-total-tokens", "16384"], **more)


for _module in (
    test_chunked_prefill_abort,
    test_disaggregation_chunked_prefill_abort,
    test_disaggregation_peer_liveness_abort,
):
    _their: Any = _module
    if hasattr(_their, "LONG_PROMPT"):
        _their.LONG_PROMPT = _their.LONG_PROMPT[: len(_their.LONG_PROMPT) // 8]  # 8192 tokens with the 4096 new ones
    if hasattr(_their, "PD_LONG_PROMPT"):
        _their.PD_LONG_PROMPT = _their.PD_LONG_PROMPT[: len(_their.PD_LONG_PROMPT) // 8]  # two cores compute it
    if hasattr(_their, "PD_EXTRA_ARGS"):
        _their.PD_EXTRA_ARGS = [*_their.PD_EXTRA_ARGS, *BOTH]
    for _name in ("DEFAULT_MODEL_NAME_FOR_TEST", "DEFAULT_SMALL_MODEL_NAME_FOR_TEST"):
        if hasattr(_their, _name):
            setattr(_their, _name, MODEL)

_their = test_chunked_prefill_abort
_their.popen_launch_server = partial(_launch, _their.popen_launch_server)
_is_abort: Any = vars(test_disaggregation_peer_liveness_abort)["_is_abort_result"]


def _is_failure(status: int, body: Any) -> bool:  # noqa: ANN401  JSON
    """Know also the texts of 0.5.23: the list of the test has none of those with which SGLang injects failures."""
    return bool(_is_abort(status, body)) or (
        status == HTTPStatus.INTERNAL_SERVER_ERROR and "KVTransferError" in str(body)
    )


vars(test_disaggregation_peer_liveness_abort)["_is_abort_result"] = _is_failure


class _Parity(PDLogprobParityMixin):
    baseline_args: Final = [*OPTIONS, "--max-total-tokens", "16384"]
    extra_prefill_args: Final = BOTH
    extra_decode_args: Final = BOTH
    decode_base_gpu_id: Final = 0  # on a CPU this is a NUMA node
    parity_logprob_delta: Final = 1e-3
    parity_prompts: Final = [[1] + [100 + i % 1000 for i in range(n)] for n in (5, 64, 256, 700)]
    parity_cached_prefix_min_prompt_tokens: Final = 128


class TestParity(_Parity, PauseResumeInPlaceMixin, PDDisaggregationServerBase):
    """The log-probabilities are a plain server's; a pause holds requests at both servers, and loses none."""

    model = MODEL
    pause_num_requests = 8
    pause_max_new_tokens = 256
    pause_ignore_eos = True

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls.pause_generate_url, cls.pause_target_urls = cls.lb_url, [cls.prefill_url, cls.decode_url]


class TestParityOfMla(_Parity, PDDisaggregationServerBase):
    """The same of an MLA model."""

    model = MLA_MODEL


class TestAbort(test_disaggregation_chunked_prefill_abort.TestDisaggChunkedPrefillAbort):
    """An abort in the midst of a prompt's chunks."""

    decode_base_gpu_id: Final = 0


class TestPlainAbort(test_chunked_prefill_abort.TestChunkedPrefillAbortE2E):
    """The same at a server that transfers nothing: kvferry is installed, and not chosen."""


class TestFailures(test_disaggregation_peer_liveness_abort.TestDisaggregationPeerLivenessAbort):
    """Failures that SGLang injects."""

    decode_base_gpu_id: Final = 0


class TestRecovery(test_disaggregation_peer_liveness_abort.TestDisaggregationPeerLivenessCleanRecovery):
    """An abort by the request's name, and no harm to others."""

    decode_base_gpu_id: Final = 0


class TestConversations(UnifiedRadixTreeTestMixin, CustomTestCase):
    """Log-probabilities after the turns of conversations; what was said before comes from HiCache's storage alone."""

    base_url: Final = DEFAULT_URL_FOR_TEST
    model: Final = MODEL
    max_new_tokens: Final = 16
    num_groups: Final = 2
    branches_per_group: Final = 2
    test_gsm8k: Final = None  # needs a data set

    @classmethod
    def setUpClass(cls) -> None:
        cls.input_ids = [prompt(576, seed) for seed in range(4)]
        cls.process = _launch(
            popen_launch_server, MODEL, cls.base_url, DEFAULT_TIMEOUT_FOR_SERVER_LAUNCH, other_args=hicache()
        )

    @classmethod
    def tearDownClass(cls) -> None:
        terminate_and_kill_process_tree(cls.process)

    def setUp(self) -> None:
        generate = vars(kl_multiturn_utils)["_generate"]
        self.addCleanup(vars(kl_multiturn_utils).__setitem__, "_generate", generate)
        vars(kl_multiturn_utils)["_generate"] = partial(_generate_from_storage, generate)


def _generate_from_storage(generate: Any, base_url: str, *arguments: object, **more: object) -> Any:  # noqa: ANN401
    """Generate after a flush; what was generated before is stored during another request, as SGLang's tests have it."""
    generate(base_url, [[7] * 3], 20)
    vars(kl_multiturn_utils)["_flush_cache"](base_url)
    return generate(base_url, *arguments, **more)
