"""What `make serve` runs: model, Ray, Serve, readiness; and on Ctrl-C all of it back down again.

``python -m app.launch.launcher --config configs/cpu.yaml --port 8000``. Deploying by hand with ``serve run`` or
``serve deploy`` works as well. The launcher adds the preparation, the progress and the clean end.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import yaml

from app.launch.arguments import parse_arguments
from app.launch.config import (
    LaunchError,
    base_url,
    cpus_needed,
    curl_line,
    load_config,
    model_of,
    parse_address,
    stop_limit_s,
    with_client_header,
    with_model,
)
from app.launch.haproxy import CLIENT_HEADER, claim_ports, haproxy_environment
from app.launch.interrupts import Interrupts
from app.launch.local_ray import LOOPBACK_ONLY, LocalRay
from app.launch.model import prepare_model
from app.launch.ports import is_loopback, port_answers, port_is_free
from app.launch.prometheus import Prometheus, scrape_configuration
from app.launch.serve_api import Progress, ServeApi, ServeApiError, progress

_RUN_DIR = Path(__file__).resolve().parents[2] / ".cache" / "run"
_RAY_START_TIMEOUT_S, _RAY_STARTS = 300.0, 3
_SHOWN_OF_A_LOG = 1500
_NO_HAPROXY = "no HAProxy: {}; `make serve PROXY=serve` does without"
_SHUTDOWN_TIMEOUT_S = 45.0
_DASHBOARD_TIMEOUT_S = 60.0


class Launcher:
    """One launch. `run` returns when stopped; `close` undoes what `run` did, in any state."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._ports = parse_address(options.ray_address, options.ray_port, options.dashboard_port)
        self._dashboard_url = f"http://{self._ports.host}:{self._ports.dashboard}"
        self._api = ServeApi(self._dashboard_url)
        self._ray: LocalRay | None = None
        self._prometheus: Prometheus | None = None
        self._deployed: dict[str, Any] | None = None
        self._shown: Progress | None = None
        self._exit = contextlib.ExitStack()
        self._started = time.monotonic()

    def run(self) -> None:
        """Bring everything up, say so, and stay until a signal or the end of Ray."""
        config = load_config(self._options.config, self._options.port)
        own_ray = self._check_ports(config)
        if self._options.observe:
            taken = {config["http_options"]["port"], self._ports.gcs, self._ports.dashboard}
            self._prometheus = Prometheus(self._options.prometheus_port, taken)
        config = with_model(config, prepare_model(model_of(config)))
        if own_ray and self._options.proxy != "serve":
            config = with_client_header(config, CLIENT_HEADER)
        written = _RUN_DIR / f"{os.getpid()}.yaml"
        written.parent.mkdir(parents=True, exist_ok=True)
        written.write_text(yaml.safe_dump(config, sort_keys=False))
        if own_ray:
            self._start_ray(self._options.num_cpus or cpus_needed(model_of(config)))
        self._refuse_second_serve()
        self._say(f"deploying {self._options.config} (as written to {written})")
        self._deployed = config
        self._api.deploy(config)
        if self._prometheus is not None:
            self._prometheus.start(
                scrape_configuration(self._api.session()), _RUN_DIR / f"{os.getpid()}-prometheus.log"
            )
        self._wait_until_ready(config)
        self._announce(config)
        self._watch(config)

    def close(self, interrupts: Interrupts) -> None:
        """Shut Serve and Ray down as far as they are ours. Two interrupts meanwhile kill them."""
        try:
            with interrupts.ending():
                self._end()
        except KeyboardInterrupt:
            self._say("killing what is left")
            if self._prometheus is not None:
                self._prometheus.stop(timeout_s=0.0)
            if self._ray is not None:
                self._ray.kill()
        self._exit.close()
        if self._deployed is not None or self._ray is not None:
            self._say("stopped")

    def _end(self) -> None:
        if self._deployed is not None:
            limit_s = stop_limit_s(model_of(self._deployed))
            self._say(f"letting answers end, {limit_s:.0f} s at most (Ctrl-C twice kills them)")
            self._shut_serve_down(self._deployed, limit_s)
        if self._prometheus is not None:
            self._prometheus.stop()
        if self._ray is not None:
            self._say(f"stopping Ray (its logs stay in {tempfile.gettempdir()}/ray/session_latest/logs)")
            self._ray.stop()

    def _check_ports(self, config: Mapping[str, Any]) -> bool:
        """Whether Ray has to be started. Raises LaunchError for a port that is busy, before anything starts."""
        http, ports = config["http_options"], self._ports
        if not port_is_free(http["host"], http["port"]):
            raise LaunchError(f"port {http['port']} is busy; choose another with `make serve PORT=...`")
        if port_answers(ports.host, ports.gcs):
            if not self._api.answers():
                raise LaunchError(
                    f"{ports.host}:{ports.gcs} is taken, but {self._dashboard_url} is no Ray dashboard: "
                    "set DASHBOARD_PORT for that cluster, or RAY_PORT for one of our own"
                )
            if self._options.proxy:
                raise LaunchError("PROXY is for a Ray of our own: where Ray is started, set RAY_SERVE_ENABLE_HA_PROXY")
            if self._options.observe:
                raise LaunchError("OBSERVE is for a Ray of our own: where Ray is started, set RAY_PROMETHEUS_HOST")
            self._say(f"using the Ray cluster at {ports.host}:{ports.gcs}")
            return False
        if len({http["port"], ports.gcs, ports.dashboard}) < 3:
            raise LaunchError(
                f"PORT {http['port']}, RAY_PORT {ports.gcs} and DASHBOARD_PORT {ports.dashboard} must be three ports"
            )
        if not port_is_free(ports.host, ports.gcs):
            raise LaunchError(f"no Ray cluster answers at {ports.host}:{ports.gcs}")
        if not port_is_free(ports.host, ports.dashboard):
            raise LaunchError(f"the dashboard's port {ports.dashboard} is busy; choose another DASHBOARD_PORT")
        return True

    def _start_ray(self, num_cpus: int) -> None:
        """Start a Ray of our own. Ray ends when a process of its own is slow to start, and is then started again."""
        self._say(f"starting Ray at {self._ports.host}:{self._ports.gcs}")
        proxy_ports = self._proxy_ports()
        deadline = time.monotonic() + _RAY_START_TIMEOUT_S
        for number in range(1, _RAY_STARTS + 1):
            log = _RUN_DIR / f"{os.getpid()}-ray-{number}.log"
            folder = Path(tempfile.mkdtemp(prefix="baton-"))
            try:
                environment = self._ray_environment(proxy_ports, folder)
            except BaseException:
                shutil.rmtree(folder)
                raise
            self._ray = LocalRay(self._ports, num_cpus, log, environment, folder)
            while (status := self._ray.exit_status()) is None:
                if self._api.answers() and self._api.serves():
                    return
                if time.monotonic() > deadline:
                    raise LaunchError(f"Ray did not start within {_RAY_START_TIMEOUT_S:.0f} s; see {log}")
                time.sleep(0.5)
            self._say(f"Ray ended with status {status} while it started; see {log}")
            self._ray.stop()
        end = log.read_text(errors="replace")[-_SHOWN_OF_A_LOG:].strip()
        raise LaunchError(f"Ray did not start in {_RAY_STARTS} tries; {log} ends with\n{end}")

    def _proxy_ports(self) -> range | None:
        """Ports for HAProxy, claimed until the launcher closes; None where Serve's own proxy is asked for."""
        if self._options.proxy == "serve":
            return None
        try:
            claim, ports = claim_ports()
        except OSError as error:
            raise LaunchError(_NO_HAPROXY.format(error)) from error
        self._exit.enter_context(claim)
        return ports

    def _ray_environment(self, proxy_ports: range | None, folder: Path) -> dict[str, str]:
        """The environment of our own Ray, with HAProxy's variables where it has ports. `folder`: for its files."""
        environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment.get('PATH', '')}"
        if self._prometheus is not None:
            environment |= self._prometheus.environment
        if proxy_ports is not None:
            try:
                environment |= haproxy_environment(self._ports.host, proxy_ports, folder)
            except OSError as error:
                raise LaunchError(_NO_HAPROXY.format(error)) from error
        return environment

    def _refuse_second_serve(self) -> None:
        """Deploying replaces every application of a cluster, and Serve's HTTP port is set once."""
        if running := self._api.details_within(_DASHBOARD_TIMEOUT_S).get("applications"):
            raise LaunchError(
                f"this Ray cluster already serves {', '.join(running)}: shut that down (`serve shutdown`), "
                "or choose another RAY_PORT and DASHBOARD_PORT"
            )

    def _wait_until_ready(self, config: Mapping[str, Any]) -> None:
        deadline = time.monotonic() + self._options.timeout_s
        refusal = ""
        while True:
            seen = self._look(config)
            if seen.failed:
                raise LaunchError(f"the deployment failed: {seen.status}\n{seen.message}")
            if seen.status == "RUNNING":
                answer = _ready(base_url(config))
                if not answer:
                    return
                if answer != refusal:
                    self._say(f"GET /ready: {answer}")
                refusal = answer
            if time.monotonic() > deadline:
                raise LaunchError(f"not ready within {self._options.timeout_s:.0f} s ({refusal or seen.status})")
            time.sleep(1.0)

    def _announce(self, config: Mapping[str, Any]) -> None:
        url = base_url(config)
        self._say(f"Ready in {time.monotonic() - self._started:.0f} s")
        print(f"\n  URL        {url}/v1\n  Ray        {self._ports.host}:{self._ports.gcs}{self._ray_hint()}")
        print(
            f"  Dashboard  {self._dashboard_url}{self._prometheus_line()}\n\n"
            f"  {curl_line(url, model_of(config).model.name)}\n",
            flush=True,
        )

    def _ray_hint(self) -> str:
        if self._ray is None or not is_loopback(self._ports.host):
            return ""
        variables = " ".join(f"{name}={value}" for name, value in LOOPBACK_ONLY.items())
        return f"  (loopback only: `ray` commands need {variables})"

    def _prometheus_line(self) -> str:
        return "" if self._prometheus is None else f"\n  Prometheus {self._prometheus.url}"

    def _watch(self, config: Mapping[str, Any]) -> None:
        """Report changes until a signal. Serve itself repairs what it can."""
        while True:
            for _ in range(10):
                self._require_ray()
                if self._ray is not None:
                    self._ray.reap_orphans()
                time.sleep(1.0)
            if self._prometheus is not None and self._prometheus.has_ended:
                self._say(f"Prometheus has ended; see {self._prometheus.log}. Serving goes on")
                self._prometheus.stop()
                self._prometheus = None
            try:
                self._look(config)
            except ServeApiError as error:
                self._say(str(error))

    def _look(self, config: Mapping[str, Any]) -> Progress:
        self._require_ray()
        seen = progress(
            self._api.details_within(_DASHBOARD_TIMEOUT_S), config["applications"][0].get("name", "default")
        )
        for line in seen.changes(self._shown):
            self._say(line)
        self._shown = seen
        return seen

    def _require_ray(self) -> None:
        if self._ray is not None and (status := self._ray.exit_status()) is not None:
            raise LaunchError(f"Ray ended with status {status}; see {self._ray.log}")

    def _shut_serve_down(self, config: Mapping[str, Any], limit_s: float) -> None:
        try:
            if not self._api.remove(config, limit_s):
                self._say("not all of it has ended in time")
        except ServeApiError as error:
            self._say(str(error))
        try:
            self._api.shutdown(_SHUTDOWN_TIMEOUT_S)
        except ServeApiError as error:
            self._say(str(error))

    def _say(self, text: str) -> None:
        print(f"[{time.monotonic() - self._started:4.0f} s] {text}", flush=True)


def _ready(url: str) -> str:
    """An empty string when GET /ready answers 200, else what it answered."""
    try:
        answer = httpx.get(f"{url}/ready", timeout=10.0, trust_env=False)
    except httpx.HTTPError as error:
        return repr(error)
    return "" if answer.status_code == httpx.codes.OK else f"{answer.status_code} {answer.text.strip()[:300]}"


def main(arguments: list[str] | None = None) -> int:
    """Run until stopped. 0 after a signal, 1 with a reason when something failed."""
    interrupts = Interrupts()
    launcher: Launcher | None = None
    try:
        interrupts.install()
        launcher = Launcher(parse_arguments(arguments))
        launcher.run()
    except KeyboardInterrupt:
        return 0
    except (LaunchError, ServeApiError) as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 1
    finally:
        if launcher is not None:
            launcher.close(interrupts)
    return 0
