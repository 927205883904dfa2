"""Serve's autoscaling: by the sessions that replicas tell of, or by the session manager's plan.

The second half runs Serve's own code around the plan's policy, without a cluster: what Baton takes from it is not
documented, so these tests are where a new Ray shows that it has moved.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve._private.autoscaling_state import AutoscalingStateManager
from ray.serve._private.common import DeploymentID, ReplicaID, ReplicaMetricReport, TimeStampedValue
from ray.serve._private.config import DeploymentConfig
from ray.serve._private.deployment_info import DeploymentInfo
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy
from ray.serve.schema import ServeDeploySchema

from app.launch.config import PLANNED as NAMED
from app.main import build
from configs.schema import BatonConfig
from deployments.serve.scaling import MANAGER, PLANNED, SESSIONS, STAY, TARGET, by_sessions, planned, stay

CONFIG = yaml.safe_load((Path(__file__).parents[3] / "configs" / "mock-scaling.yaml").read_text())
SCALED = {"prefill": (1, 2), "decode-main": (1, 3), "decode-large": (0, 1)}


def context(told: Any, replicas: int = 2, seen: float = 0.0) -> AutoscalingContext:
    """A pool of `replicas`; `seen`: the requests that Serve itself counts."""
    return AutoscalingContext(
        deployment_id=None,
        deployment_name="decode-main",
        app_name="baton",
        current_num_replicas=replicas,
        target_num_replicas=replicas,
        running_replicas=[],
        total_num_requests=seen,
        total_queued_requests=0.0,
        aggregated_metrics=told,
        raw_metrics={},
        capacity_adjusted_min_replicas=1,
        capacity_adjusted_max_replicas=9,
        policy_state={},
        last_scale_up_time=None,
        last_scale_down_time=None,
        current_time=None,
        config=AutoscalingConfig(
            min_replicas=1, max_replicas=9, target_ongoing_requests=4, upscale_delay_s=0, downscale_delay_s=0
        ),
    )


@pytest.mark.parametrize(
    ("told", "wanted"),
    [
        ({SESSIONS: {"a": 4.0, "b": 4.0}}, 2),
        ({SESSIONS: {"a": 12.0, "b": 4.0}}, 4),
        ({SESSIONS: {"a": 1.0, "b": 0.0}}, 0.25),
        ({}, 0),
        (None, 0),
    ],
)
def test_a_pool_has_as_many_replicas_as_its_sessions_ask_for(told: Any, wanted: float) -> None:
    """Serve rounds, and keeps to the least and the most."""
    assert by_sessions(context(told))[0] == wanted


def test_what_serve_counts_itself_does_not_matter() -> None:
    assert by_sessions(context({SESSIONS: {"a": 4.0, "b": 4.0}}, seen=100.0))[0] == 2


# ---- the plan, within Serve's own code


class Controller:
    """Serve's controller as far as it scales, with the application of configs/mock-scaling.yaml, all of one size."""

    def __init__(self, has_policy: bool = True) -> None:
        (application,) = ServeDeploySchema.model_validate(CONFIG).applications
        self.state = AutoscalingStateManager()
        if has_policy:
            assert application.autoscaling_policy is not None
            self.state.register_application("baton", AutoscalingPolicy(**application.autoscaling_policy))
        self.targets: dict[DeploymentID, int] = {}
        self.managers = 0
        for name, deployment in _deployments(build(BatonConfig.model_validate(application.args))).items():
            found = DeploymentConfig.from_proto_bytes(deployment._deployment_config.to_proto_bytes())
            deployment_id = DeploymentID(name, "baton")
            self.targets[deployment_id] = 1
            if found.autoscaling_config is not None:
                info = DeploymentInfo(found, deployment._replica_config, 0, "")
                self.targets[deployment_id] = self.state.register_deployment(deployment_id, info, 1)
        self.run()

    def run(self) -> None:
        """Every replica runs that is wanted."""
        for deployment_id, target in self.targets.items():
            replicas = [ReplicaID(f"r{number}", deployment_id) for number in range(target)]
            if deployment_id.name == MANAGER:
                replicas = [self.manager(number) for number in range(self.managers)]
            if not self.state.should_autoscale_deployment(deployment_id):
                continue
            self.state.update_running_replica_ids(deployment_id, replicas)

    def manager(self, number: int) -> ReplicaID:
        return ReplicaID(f"manager{number}", DeploymentID(MANAGER, "baton"))

    def tell(self, at_s: float, manager: int = 0, **targets: float) -> None:
        """A manager's plan, as Serve carries it. Pools' names have "_" for "-"."""
        self.managers = max(self.managers, manager + 1)
        self.run()
        told = {f"{TARGET}{pool.replace('_', '-')}": number for pool, number in targets.items()}
        series = {
            name: [TimeStampedValue(at_s - 1, 99.0), TimeStampedValue(at_s, number)] for name, number in told.items()
        }
        self.state.record_request_metrics_for_replica(ReplicaMetricReport(self.manager(manager), series, at_s))

    def tick(self) -> dict[str, int]:
        """One turn of Serve's control loop: the targets afterwards, of the deployments that scale."""
        self.targets |= self.state.get_decision_num_replicas("baton", self.targets)
        self.run()
        return {deployment_id.name: target for deployment_id, target in self.targets.items()}


def _deployments(application: Any) -> dict[str, Any]:
    """The application's deployments by name."""
    found: dict[str, Any] = {}

    def visit(node: Any) -> None:
        deployment = node._bound_deployment
        found[deployment.name] = deployment
        for each in (*deployment.init_args, *deployment.init_kwargs.values()):
            for value in each.values() if isinstance(each, dict) else (each,):
                if hasattr(value, "_bound_deployment"):
                    visit(value)

    visit(application)
    return found


def sizes(ticked: dict[str, int]) -> list[int]:
    return [ticked[name] for name in SCALED]


def test_serve_carries_the_plan_out_at_once_and_within_its_bounds() -> None:
    controller = Controller()
    assert sizes(controller.tick()) == [1, 1, 0], "without a plan all stays, at first as configured"
    controller.tell(10.0, prefill=2, decode_main=3, decode_large=1)
    ticked = controller.tick()
    assert sizes(ticked) == [2, 3, 1]
    assert ticked["ingress"] == ticked[MANAGER] == 1
    assert sizes(controller.tick()) == [2, 3, 1]
    controller.tell(20.0, prefill=7, decode_main=0, decode_large=-3)
    controller.tick()
    assert sizes(controller.tick()) == [2, 1, 0]


def test_a_pool_goes_to_zero_and_back() -> None:
    controller = Controller()
    for at_s, target in ((10.0, 1), (20.0, 0), (30.0, 1), (40.0, 0)):
        controller.tell(at_s, prefill=1, decode_main=1, decode_large=target)
        assert sizes(controller.tick()) == [1, 1, target]


def test_pools_stay_as_they_are_while_the_manager_is_away() -> None:
    controller = Controller()
    controller.tell(10.0, prefill=2, decode_main=2, decode_large=1)
    controller.tick()
    controller.state.on_replica_stopped(controller.manager(0))
    controller.managers = 0
    controller.run()
    assert sizes(controller.tick()) == [2, 2, 1]


def test_the_later_word_of_two_managers_counts() -> None:
    controller = Controller()
    controller.tell(11.0, 1, prefill=1, decode_main=2, decode_large=0)
    controller.tell(10.0, 0, prefill=1, decode_main=3, decode_large=0)
    assert sizes(controller.tick()) == [1, 2, 0]


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_the_policy_does_not_raise(number: float) -> None:
    controller = Controller()
    controller.tell(10.0, prefill=number, decode_main=2.0)
    controller.tell(11.0, no_such_pool=2.0)
    assert sizes(controller.tick()) == [1, 1, 0]
    assert planned({}) == ({}, {})
    context_of_manager = context(None)
    context_of_manager.deployment_name = MANAGER
    assert planned({"manager": context_of_manager}) == ({}, {})


def test_pools_stay_where_the_application_has_no_policy() -> None:
    """Serve's own policy would see no request, and shrink them at once."""
    controller = Controller(has_policy=False)
    controller.tell(10.0, prefill=2, decode_main=3, decode_large=1)
    assert sizes(controller.tick()) == [1, 1, 0]
    assert stay(context({}, replicas=5)) == (5, {})


@pytest.mark.parametrize("policy", [PLANNED, STAY])
def test_the_controller_needs_nothing_of_ours_to_run_a_policy(policy: dict[str, str]) -> None:
    pickled = AutoscalingPolicy(**policy).get_serialized_policy_def()
    assert pickled
    imported = []

    class Watched(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            imported.append(module)
            return super().find_class(module, name)

    loaded = Watched(io.BytesIO(pickled)).load()
    assert loaded.__name__ == policy["policy_function"].partition(":")[2]
    assert imported
    assert [module for module in imported if module.partition(".")[0] in ("app", "configs", "deployments")] == []


def test_the_launcher_names_the_same_policy() -> None:
    assert PLANNED == {"policy_function": NAMED}


def test_serve_knows_the_manager_s_numbers_soon() -> None:
    found = _deployments(build(BatonConfig.model_validate(CONFIG["applications"][0]["args"])))
    scaling = found[MANAGER]._deployment_config.autoscaling_config
    assert (scaling.min_replicas, scaling.max_replicas) == (1, 1)
    assert scaling.metrics_interval_s == 1.0
    assert scaling.look_back_period_s > scaling.metrics_interval_s
    for name, (least, most) in SCALED.items():
        config = found[name]._deployment_config.autoscaling_config
        assert (config.min_replicas, config.max_replicas) == (least, most)
    assert found["ingress"]._deployment_config.autoscaling_config is None
