"""An engine behind HTTP, from a `ServeConfig`.

Under the roof beside `launch`, which builds the engine: whoever generates without a server does not wait for its libraries.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from jaxserve import launch
from jaxserve.config import HttpConfig, ServeConfig
from jaxserve.device.compile_counter import num_compiles
from jaxserve.engine.constraints import Constraints
from jaxserve.server import app
from jaxserve.server.service import ServerParts
from jaxserve.server.store.folder import default_root

logger = logging.getLogger(__name__)


def serve(config: ServeConfig) -> int:
    """Serve over HTTP until SIGTERM or SIGINT, then drain; the process's exit code.

    The port is open while the model loads, so `/health` answers and `/ready` says 503 until the engine is warm.
    """

    def build() -> ServerParts:
        # The first who wants structured output would hold up everyone else for a second.
        engine = launch.build_engine(config, progress=_log_progress(), meanwhile=Constraints.prepare)
        logger.info("ready: %s on http://%s:%d", engine.model_name, config.http.host, config.http.port)
        return parts_of(engine)

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    # JAX says at this level which accelerators it did not find.
    logging.getLogger("jax").setLevel(logging.WARNING)
    return app.serve(build, _with_state_dir(config.http))


def parts_of(engine: launch.Engine) -> ServerParts:
    """What a server takes over from its engine."""
    return ServerParts(
        core=engine.core,
        limits=engine.limits,
        tokenizer=engine.tokenizer,
        model_name=engine.model_name,
        num_compiles=num_compiles,
        constraints=engine.constraints,
        sampling_defaults=engine.sampling_defaults,
        adapters=engine.adapters,
        adapter_source=engine.adapter_source,
    )


def _with_state_dir(http: HttpConfig) -> HttpConfig:
    """`http` with a folder for files and batches; none where none is named and the usual one cannot be made."""
    if http.state_dir or not http.port:
        return http
    path = default_root(http.port)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        logger.warning("no files and batches: %s: %s; name a folder with --state-dir", path, error.strerror)
        return http
    return replace(http, state_dir=str(path))


def _log_progress() -> launch.Progress:
    """Log each tenth of a stage."""
    said: dict[str, int] = {}

    def progress(stage: str, done: int, total: int) -> None:
        tenth = done * 10 // total
        if tenth > said.get(stage, 0):
            said[stage] = tenth
            logger.info("%s: %d%%", stage, 10 * tenth)

    return progress
