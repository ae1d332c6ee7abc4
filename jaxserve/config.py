"""Configuration: how we serve a model (`ServeConfig`). Standard library only.

Frozen dataclasses, composed; derive a new one with `dataclasses.replace`. TOML files and flags become a `ServeConfig`
through `from_mapping`. What the weights are is for `model_config`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from jaxserve.errors import ConfigError

IMPLEMENTATIONS = ("auto", "cpu", "xla", "tpu", "gpu", "reference")
DTYPES = ("auto", "float32", "bfloat16")
WEIGHT_DTYPES = ("auto", "int8", "int4")
KV_DTYPES = (*DTYPES, "int8", "fp8")

_CHOICES: dict[str, tuple[str, ...]] = {
    "dtype": DTYPES,
    "weight_dtype": WEIGHT_DTYPES,
    "activation_dtype": ("auto", "int8"),
    "kv_dtype": KV_DTYPES,
    "attention": IMPLEMENTATIONS,
    "quant_matmul": IMPLEMENTATIONS,
    "eviction": ("lru", "cost"),
}
"""What settings of `EngineConfig` may be that are names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How the engine runs.

    Attributes:
        dtype: "float32" or "bfloat16": weights, activations and KV; "auto" is float32 on CPU, bfloat16 elsewhere.
        weight_dtype: "int8" or "int4": matrices are rounded to so many bits when they are loaded, and multiplied as they are,
            in a half or a third of the memory of bfloat16; which changes the tokens that come out. "auto" keeps `dtype`. With
            int4, embeddings and the head are in int8.
        activation_dtype: "int8": products with such matrices take activations in eight bits too, with a scale a token, which
            is faster and changes tokens more than that of the weights; "auto" keeps them in `dtype`.
        kv_dtype: "float32", "bfloat16", "int8" or "fp8": what KV pages hold; "auto" is `dtype`. Eight bits hold twice or four
            times the tokens in the same memory, and change the tokens that come out.
        max_seqs: sequences that run at once.
        max_step_tokens: token budget of a step; at least `max_seqs`.
        prefill_chunk: prompt tokens of one sequence in a step at most.
        max_context: prompt plus output tokens of a sequence; 0 takes the model's, at most 8,192.
        page_size: tokens per KV page.
        num_pages: pages in the pool; 0 sizes the pool from `kv_memory`. Where only some layers have a window, in the pool of
            the others: how many more those with a window take follows from it, and `kv_memory` is for both.
        kv_memory: bytes for the KV pool, when `num_pages` is 0; 0 takes half of what is free, at most what
            `max_seqs` sequences of `max_context` can use.
        host_kv_memory: bytes of host memory for KV pages that make room for others in the pool: they come back by a copy where
            that takes less time than to compute them again, which is measured at start-up; 0 for none.
        tensor_parallel: devices that share each layer.
        expert_parallel: times as many devices, for a mixture of experts: each `tensor_parallel` of them have their own part of
            the experts, and all share the rest of each layer.
        attention: "auto" takes the fastest implementation that is proven on the platform; "cpu", "xla", "tpu", "gpu" or
            "reference" ask for one.
        quant_matmul: the same of products with weights in eight or four bits.
        prefix_cache: keep the KV pages of prefixes that were computed, for requests that begin the same.
        eviction: which cached pages go first: "lru", those idle for longest, or "cost", which also keeps what is used often or
            costs most to compute again.
        pin_prefix: file with the text of a system prompt whose pages are computed at start-up and never given up; "" for none.
        max_adapters: LoRA adapters that can be loaded at once; 0 for none. With any, start-up compiles each step twice.
        max_adapter_rank: largest rank of one; memory is taken for `max_adapters` of that rank.
        adapter: a LoRA adapter to load at start-up, as NAME=PATH of a PEFT directory; give it once for each.
        overlap: dispatch step n+1 before the tokens of step n are read.
        slo_itl_ms: milliseconds between two tokens of a sequence: prompts are cut into chunks that keep it for sequences
            that decode meanwhile; 0 for no target.
        step_cost: file that "python -m bench.calibrate" wrote, from which the target predicts; "" measures at start-up.
        generation_config: how to sample where a request does not say: "auto" takes what the model's generation_config.json, or
            a GGUF's metadata, has of temperature, top_k, top_p, min_p and repetition_penalty; "none" leaves the API's own
            defaults; anything else is the path of another such file, or of its folder.
        compile_cache: directory of the persistent compilation cache; "" for the default under the user's cache folder.
    """

    dtype: str = "auto"
    weight_dtype: str = "auto"
    activation_dtype: str = "auto"
    kv_dtype: str = "auto"
    max_seqs: int = 32
    max_step_tokens: int = 512
    prefill_chunk: int = 512
    max_context: int = 0
    page_size: int = 64
    num_pages: int = 0
    kv_memory: int = 0
    host_kv_memory: int = 0
    tensor_parallel: int = 1
    expert_parallel: int = 1
    attention: str = "auto"
    quant_matmul: str = "auto"
    prefix_cache: bool = True
    eviction: str = "lru"
    pin_prefix: str = ""
    max_adapters: int = 0
    max_adapter_rank: int = 16
    adapter: tuple[str, ...] = ()
    overlap: bool = True
    slo_itl_ms: float = 0.0
    step_cost: str = ""
    generation_config: str = "auto"
    compile_cache: str = ""

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                known = f"{', '.join(choices[:-1])} or {choices[-1]}"
                raise ConfigError(f"{name} must be {known}, found {getattr(self, name)!r}")
        at_least_one = ("max_seqs", "max_step_tokens", "prefill_chunk", "page_size", "tensor_parallel", "expert_parallel")
        for name in (*at_least_one, "max_adapter_rank"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, found {getattr(self, name)}")
        for name in ("max_context", "num_pages", "kv_memory", "host_kv_memory", "slo_itl_ms", "max_adapters"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must be at least 0, found {getattr(self, name)}")
        for name in ("host_kv_memory", "pin_prefix"):
            if getattr(self, name) and not self.prefix_cache:
                raise ConfigError(f"{name} ({getattr(self, name)}) needs prefix_cache, which is off")
        if self.max_step_tokens < self.max_seqs:
            raise ConfigError(
                f"max_step_tokens ({self.max_step_tokens}) must be at least max_seqs ({self.max_seqs}), "
                "so that every running sequence can decode in a step"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpConfig:
    """The HTTP server.

    Attributes:
        host: address to listen on; 0.0.0.0 for every interface.
        port: TCP port to listen on; 0 takes a free one.
        served_model_name: the model's name in requests and answers; "" takes the model's own.
        state_dir: folder for what /v1/files and /v1/batches keep, which outlives the server; one server at a time has it; ""
            takes one for each port in the user's state folder.
        adapter_dir: folder of the LoRA adapters that POST /v1/load_lora_adapter may load; "" refuses all.
        max_file_bytes: larger files are answered 413.
        certfile: PEM file of a certificate and its chain, to serve TLS; "" serves plain HTTP.
        keyfile: PEM file of its private key; "" if `certfile` has it too.
        cors_origin: origin whose web pages may call this server, such as https://chat.example.org, or * for all; give it once
            for each. None may by default.
        max_body_bytes: larger request bodies are answered 413; 0 takes 4 MiB, or 64 bytes a token of the context if that is
            more.
        max_header_bytes: a longer request line or header field is answered 431.
        max_connections: one more takes the place of an idle one, or is answered 503; 0 takes what the limit of open files
            allows.
        head_timeout: seconds for a request's line and headers to come, from when they, or the connection, began.
        body_timeout: seconds for a request's body to come, beside a second for each 16 KiB.
        idle_timeout: seconds that a connection is kept open for a next request.
        max_queue_requests: requests that may wait; more are answered 429.
        max_queue_tokens: prompt tokens that may wait; more are answered 429; 0 takes four times what the KV pool holds.
        max_output_tokens: output tokens of an answer at most; requests for more are answered 400; 0 for no limit but the
            context.
        request_timeout: seconds after which a request is answered 408, waiting or running; 0 for no limit. Its own
            `timeout` holds if it is shorter.
        slo_ttft_ms: milliseconds in which the first token has to come; a request that would miss this is answered 429; 0 for
            no target. Batch requests are exempt.
        api_key: what clients must send as a bearer token; "" serves anyone.
        api_keys_file: TOML file of API keys with labels, weights and priorities; see the README.
        admin_key: bearer token for DELETE /v1/cache and for loading adapters, beside API keys with admin = true; "" for none.
        chat_template: file with a chat template to use instead of the model's own; "" for the model's.
        tool_format: how the model writes calls of functions: hermes, llama3, mistral, mistral-args, gemma, functiongemma or
            none; auto takes what its chat template shows.
        reasoning_format: how the model marks reasoning: think, mistral or gemma; none leaves it in the text; auto as above.
        special_tokens_in_messages: what spells a special token in a message, such as <|im_end|>, is one; otherwise it is text,
            and only the chat template writes special tokens.
        trust_request_chat_template: requests may bring a chat template of their own. It runs in a sandbox and in bounded time,
            but can take much memory.
        drain_seconds: how long running requests may go on after SIGTERM.
        stall_seconds: how long a client may read nothing of an answer before it is dropped.
        ping_seconds: after so long without a chunk, a stream has a comment (": keep-alive"); 0 for none.
        hang_seconds: how long a step may take before /health and /ready say 503; 0 for ever.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str = ""
    max_queue_requests: int = 1024
    max_queue_tokens: int = 0
    max_output_tokens: int = 0
    request_timeout: float = 0.0
    slo_ttft_ms: float = 0.0
    api_key: str = field(default="", repr=False)
    api_keys_file: str = ""
    admin_key: str = field(default="", repr=False)
    state_dir: str = ""
    adapter_dir: str = ""
    max_file_bytes: int = 200 * 1024 * 1024
    certfile: str = ""
    keyfile: str = ""
    cors_origin: tuple[str, ...] = ()
    max_body_bytes: int = 0
    max_header_bytes: int = 16 * 1024
    max_connections: int = 0
    head_timeout: float = 20.0
    body_timeout: float = 30.0
    idle_timeout: float = 75.0
    chat_template: str = ""
    tool_format: str = "auto"
    reasoning_format: str = "auto"
    special_tokens_in_messages: bool = False
    trust_request_chat_template: bool = False
    drain_seconds: float = 30.0
    stall_seconds: float = 60.0
    ping_seconds: float = 15.0
    hang_seconds: float = 300.0

    def __post_init__(self) -> None:
        for name in (
            *("max_queue_tokens", "max_output_tokens", "request_timeout", "slo_ttft_ms"),
            *("max_body_bytes", "max_connections", "drain_seconds", "ping_seconds", "hang_seconds"),
        ):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must be at least 0, found {getattr(self, name)}")
        if 0 < self.max_output_tokens < 16:
            raise ConfigError(
                f"max_output_tokens must be 0 or at least 16, what a completion has by default, found {self.max_output_tokens}"
            )
        for name in ("head_timeout", "body_timeout", "idle_timeout", "stall_seconds"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be above 0, found {getattr(self, name)}")
        for name, least in (("max_queue_requests", 1), ("max_header_bytes", 1024), ("max_file_bytes", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} must be at least {least}, found {getattr(self, name)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """How we serve a model. `model` is a name from `configs/models/`, a path, or `hf:ORG/NAME`."""

    model: str
    engine: EngineConfig = field(default_factory=EngineConfig)
    http: HttpConfig = field(default_factory=HttpConfig)
