"""vLLM's own OpenAI server and frontend (AsyncLLM) over an engine-core client that the caller gives.

vLLM renders, validates, tokenises and detokenises here. What it would send to its one engine core goes to that
client. The frontend loads no weights and needs no accelerator. When a new vLLM breaks this file,
`tests/app/test_frontend_contract.py` names what moved.
"""

from __future__ import annotations

import asyncio
import json
import logging
from argparse import Namespace
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, NoReturn

import vllm.platforms
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.middleware import Middleware
from vllm.config import LoggingConfig, LoRAConfig, VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.logger import configure_logging_if_needed
from vllm.reasoning import ReasoningParserManager
from vllm.renderers import renderer_from_config
from vllm.tool_parsers import ToolParserManager
from vllm.tracing import init_tracer
from vllm.transformers_utils.config import maybe_register_config_serialize_by_value
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.engine.output_processor import OutputProcessor

from app import message_stream, model_route, openapi
from app.early_check import EarlyCheck
from app.errors import TooDeep, answer
from app.grammar_check import CheckingApart
from app.in_turn import InTurn
from app.stored_responses import StoredResponses
from configs.schema import BatonConfig, LoraConfig

TASKS = ("generate",)
BUILD_TIMEOUT_S = 300.0

# Every route of vLLM's that a user always gets. These are left out: /health (Baton's own); administration of one engine
# (elastic ep, kv_event_sources, its development mode); vLLM's own disaggregation (/inference, render, derender); stored
# responses, which `app/stored_responses.py` answers; what Baton does not generate (systemone, generative_scoring);
# /invocations (another name for a route that is here).
ALLOWED_ROUTES = frozenset(
    {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/chat/completions/batch",
        "/v1/responses",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/models",
        "/ping",
        "/tokenize",
        "/detokenize",
        "/version",
        "/metrics",
        "/openapi.json",
        "/docs",
        "/docs/oauth2-redirect",
        "/redoc",
    }
)
# Those that an option of `ingress.server_args` switches on. Without its option, /load would always say 0.
SWITCHED_ROUTES = {
    "/load": "enable_server_load_tracking",
    "/tokenizer_info": "enable_tokenizer_info_endpoint",
    "/static": "enable_offline_docs",
}
# Unlike vLLM's defaults. A forced tool without `strict` gets arguments of its schema, and not any JSON.
DEFAULTS = {"enable_prompt_tokens_details": True, "tool_strict_level": "parameter"}

# Options of `vllm serve` that Baton sets, or that mean nothing without an engine and a socket of vLLM's own.
_OWNED = frozenset(
    {
        "model",
        "model_tag",
        "served_model_name",
        "max_model_len",
        "dtype",
        "quantization",
        "skip_tokenizer_init",
    }
    | {"config", "headless", "grpc", "api_server_count", "host", "port", "uds", "kv_transfer_config"}
    | {"lora_modules", "enable_lora", "enable_fault_tolerance", "enable_scale_out"}
    | {"disable_log_stats", "enable_per_request_metrics", "otlp_traces_endpoint", "collect_detailed_traces"}
    | {"allowed_origins", "allowed_methods", "allowed_headers", "allow_credentials"}
    | {"tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"}
)


class ClusterLLM(AsyncLLM):
    """An AsyncLLM over a given engine-core client. It starts no engine and keeps no statistics of one.

    Its attributes are those that `AsyncLLM.__init__` sets. Those that never differ at the start are the class's.
    """

    log_stats = False
    logger_manager = None
    admission_stats = None
    profiler = None
    output_handler = None
    _client_count = 1
    _frontend_profiler_injected = False
    _profile_session_guard_enabled = False
    _profile_session_active = False

    def __init__(
        self, vllm_config: VllmConfig, core: EngineCoreClient, max_grammar_characters: int, log_requests: bool = False
    ) -> None:
        """Set what `AsyncLLM.__init__` sets, without building a client. Call it in a running event loop."""
        configure_logging_if_needed(vllm_config.logging_config)
        maybe_register_config_serialize_by_value()
        self.vllm_config = vllm_config
        self.model_config = vllm_config.model_config
        self.scheduler_config = vllm_config.scheduler_config
        self.observability_config = vllm_config.observability_config
        self.log_requests = log_requests
        self._elastic_ep_lock = asyncio.Lock()
        self._profile_lock = asyncio.Lock()
        self._set_processors(max_grammar_characters)
        self.engine_core = core
        self._run_output_handler()

    def _set_processors(self, max_grammar_characters: int) -> None:
        tracing_endpoint = self.observability_config.otlp_traces_endpoint
        if tracing_endpoint is not None:
            init_tracer("vllm.llm_engine", tracing_endpoint)
        self.renderer = renderer_from_config(self.vllm_config)
        self.input_processor = CheckingApart(self.vllm_config, self.renderer, max_grammar_characters)
        self.output_processor = OutputProcessor(
            self.renderer.tokenizer,
            log_stats=False,
            stream_interval=self.scheduler_config.stream_interval,
            tracing_enabled=tracing_endpoint is not None,
        )

    async def add_request(self, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's, without the client's `kv_transfer_params`: a client does not decide how KV moves.

        What costs much of the check is done apart.
        """
        extra = getattr(params, "extra_args", None)
        if extra and "kv_transfer_params" in extra:
            params.extra_args = {k: v for k, v in extra.items() if k != "kv_transfer_params"} or None
        await self.input_processor.check(params, await self.get_supported_tasks())
        try:
            return await super().add_request(request_id, prompt, params, *args, **kwargs)
        finally:
            self.input_processor.forget(params)

    def shutdown(self, timeout: float | None = None) -> None:
        """As vLLM's."""
        self.input_processor.close()
        super().shutdown(timeout)


async def build_server(
    config: BatonConfig, model_path: str, core: EngineCoreClient, stored: Middleware | None = None
) -> tuple[ClusterLLM, FastAPI]:
    """Build vLLM's OpenAI server over `core`. The application is ready to serve when this returns.

    `stored`: `StoredResponses`, with its arguments. It goes behind vLLM's own middleware, which checks API keys.

    Raises:
        ValueError: `ingress.server_args` holds something that cannot be set.
    """
    # A package that vLLM's server imports raises the root logger's level to ERROR: our warnings would be lost.
    logging.getLogger("baton").setLevel(logging.WARNING)
    args = _serve_args(config, model_path)
    most = config.ingress.max_grammar_characters
    llm = ClusterLLM(_vllm_config(args, config.lora), core, most, log_requests=args.enable_log_requests)
    app = build_app(args, TASKS, llm.model_config)
    allowed = ALLOWED_ROUTES | {path for path, option in SWITCHED_ROUTES.items() if getattr(args, option)}
    app.router.routes[:] = [r for r in app.router.routes if getattr(r, "path", None) in allowed]
    async with asyncio.timeout(BUILD_TIMEOUT_S):
        await init_app_state(llm, app.state, args, TASKS)
    model_route.install(app)
    message_stream.pass_errors_on(app)
    longest = config.model.max_model_len * llm.renderer.get_tokenizer().max_chars_per_token
    own = (stored or Middleware(StoredResponses), Middleware(InTurn), Middleware(EarlyCheck, app, longest))
    app.user_middleware += own
    app.middleware_stack = None  # a package that vLLM loads has built it before; it is built anew, with these
    openapi.complete(app)
    app.add_exception_handler(RecursionError, _too_deep)
    # vLLM's error handler tells its uvicorn to exit when the frontend has died. Here `llm.errored` says so instead.
    app.state.server = SimpleNamespace(should_exit=False)
    if config.ingress.default_max_tokens is not None:
        _set_default_max_tokens(app, config.ingress.default_max_tokens)
    return llm, app


async def _too_deep(request: Request, error: Exception) -> Response:
    """Answer for the JSON parsers that vLLM's server calls, such as for the arguments of a tool call."""
    refusal = answer(TooDeep("something in the request is nested too deeply"))
    return JSONResponse(refusal.body, refusal.status)


def _set_default_max_tokens(app: FastAPI, tokens: int) -> None:
    """vLLM's own option for this, `override_generation_config`, would be a limit for chats that ask for more."""
    state = app.state
    for serving in (
        state.openai_serving_chat,
        state.openai_serving_chat_batch,
        state.openai_serving_responses,
        state.anthropic_serving_messages,
    ):
        serving.default_sampling_params.setdefault("max_tokens", tokens)


def frontend_config(config: BatonConfig, model_path: str) -> VllmConfig:
    """The configuration of a frontend without an engine: model, tokenizer and formats, but no weights and no device."""
    return _vllm_config(_serve_args(config, model_path), config.lora)


def _vllm_config(args: Namespace, lora: LoraConfig | None = None) -> VllmConfig:
    """Built as vLLM's `launch render` builds it: `create_engine_config` would check quantisation on this node."""
    _settle_platform()
    engine_args = AsyncEngineArgs.from_cli_args(args)
    model_config = engine_args.create_model_config()
    model_config.quantization = None
    vllm_config = VllmConfig(
        model_config=model_config,
        logging_config=engine_args.create_logging_config(),
        structured_outputs_config=engine_args.create_structured_outputs_config(),
        observability_config=engine_args.create_observability_config(),
        reasoning_config=engine_args.reasoning_config,
        lora_config=None if lora is None else LoRAConfig(**lora.model_dump(exclude={"adapters"})),
    )
    for name in ("stream_interval", "max_num_queued_reqs", "max_num_queued_tokens"):
        setattr(vllm_config.scheduler_config, name, getattr(engine_args, name))
    return vllm_config


def _settle_platform() -> None:
    """Let a CUDA build configure a frontend on a node without a GPU, as vLLM's own CLI does for `bench`."""
    if vllm.platforms.current_platform.is_unspecified():
        from vllm.platforms.cpu import CpuPlatform

        vllm.platforms.current_platform = CpuPlatform()


class _Parser(FlexibleArgumentParser):
    """The parser of `vllm serve`. It raises where the command line would exit."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"ingress.server_args: {message}")


def _serve_args(config: BatonConfig, model_path: str) -> Namespace:
    """The arguments of `vllm serve`: Baton's, and those of `ingress.server_args` by their argparse names."""
    parser = make_arg_parser(_Parser())
    given = {**DEFAULTS, **config.ingress.server_args}
    known = vars(parser.parse_args([]))
    if taken := sorted(_OWNED & given.keys()):
        raise ValueError(f"ingress.server_args may not set {taken}: Baton sets it, or it means nothing here")
    if unknown := sorted(given.keys() - known.keys()):
        raise ValueError(f"ingress.server_args: `vllm serve` has no option {', '.join(map(repr, unknown))}")
    model = config.model
    line = [f"--model={model_path}", f"--max-model-len={model.max_model_len}", f"--dtype={model.dtype}"]
    args: Namespace = parser.parse_args([*line, "--served-model-name", model.name, *_command_line(given)])
    for name, value in given.items():
        if not _is_text(value):
            setattr(args, name, value)
    args.disable_log_stats = True
    args.logging_config = LoggingConfig(formatter=config.log_format)
    args.allowed_origins = []  # `ingress.allowed_origins` counts, for Baton's own routes and errors as well
    _check(args)
    return args


def _command_line(given: Mapping[str, Any]) -> list[str]:
    """Options for text, numbers and mappings, which the parser checks. The caller sets all others as they are."""
    encoded = {k: json.dumps(v) if isinstance(v, dict) else str(v) for k, v in given.items() if _is_text(v)}
    return [f"--{name.replace('_', '-')}={value}" for name, value in encoded.items()]


def _is_text(value: Any) -> bool:
    return isinstance(value, str | int | float | dict) and not isinstance(value, bool)


def _check(args: Namespace) -> None:
    try:
        validate_parsed_serve_args(args)
    except TypeError as error:  # raised for two options that do not go together
        raise ValueError(f"ingress.server_args: {error}") from error
    if args.tool_parser_plugin:
        ToolParserManager.import_tool_parser(args.tool_parser_plugin)
    if args.reasoning_parser_plugin:
        ReasoningParserManager.import_reasoning_parser(args.reasoning_parser_plugin)
