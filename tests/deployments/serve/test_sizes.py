"""What Serve says of the application's sizes."""

from __future__ import annotations

from ray.serve._private.common import DeploymentStatus, DeploymentStatusTrigger, ReplicaState
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview, DeploymentStatusOverview

from deployments.manager.scaling import Size
from deployments.serve.sizes import COMING, sizes_of


def test_replicas_that_stop_do_not_count() -> None:
    states = {ReplicaState.RUNNING: 2, ReplicaState.STARTING: 1, ReplicaState.RECOVERING: 1, ReplicaState.STOPPING: 4}
    deployments = {
        "decode-main": _overview(DeploymentStatus.UPSCALING, states),
        "decode-large": _overview(DeploymentStatus.HEALTHY, {}),
    }
    application = ApplicationStatusOverview(ApplicationStatus.RUNNING, "", 0.0, deployments)
    assert sizes_of(application) == {"decode-main": Size(2, 2, False), "decode-large": Size(0, 0, True)}


def test_serve_has_no_other_states() -> None:
    known = {*COMING, "RUNNING", "STOPPING", "STOPPED"}
    assert {state.value for state in ReplicaState} == known


def _overview(status: DeploymentStatus, states: dict[ReplicaState, int]) -> DeploymentStatusOverview:
    return DeploymentStatusOverview(status, DeploymentStatusTrigger.UNSPECIFIED, states, "")
