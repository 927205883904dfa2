"""The manifests: what kustomize makes of them, their fields, the configuration inside, and that its replicas fit."""

from __future__ import annotations

import copy
import inspect
import shutil
import subprocess
from importlib.metadata import requires
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from app.launch.config import load_config, model_of, with_surge
from app.main import build
from app.own_routes import OwnRoutes
from configs.checks import bounds_of
from configs.schema import BatonConfig, PoolConfig
from tests.deploy.render import find, render
from tests.deploy.schema import schema_of

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "kubernetes"
EACH = [FOLDER / "base", *sorted((FOLDER / "overlays").iterdir())]
each_folder = pytest.mark.parametrize("folder", EACH, ids=lambda folder: folder.name)

Group = dict[str, Any]


def service(folder: Path) -> dict[str, Any]:
    spec: dict[str, Any] = find(render(folder), "RayService", "baton")["spec"]
    return spec


def configuration(folder: Path, into: Path) -> BatonConfig:
    """The application's arguments, read as the launcher reads a file."""
    file = into / "serve.yaml"
    file.write_text(service(folder)["serveConfigV2"])
    return model_of(load_config(file, None))


def groups(spec: dict[str, Any]) -> dict[str, Group]:
    return {group["groupName"]: group for group in spec["rayClusterConfig"]["workerGroupSpecs"]}


def containers(spec: dict[str, Any]) -> list[dict[str, Any]]:
    cluster = spec["rayClusterConfig"]
    pods = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    return [pod["template"]["spec"]["containers"][0] for pod in pods]


def of_secrets(pod: Group) -> dict[Path, str]:
    """Which Secret each folder of a Pod's container is, of those that are one."""
    spec = pod["template"]["spec"]
    secrets = {each["name"]: each["secret"]["secretName"] for each in spec.get("volumes", []) if "secret" in each}
    mounts = spec["containers"][0].get("volumeMounts", [])
    return {Path(each["mountPath"]): secrets[each["name"]] for each in mounts if each["name"] in secrets}


def ray_resources(group: Group) -> dict[str, float]:
    """What Ray counts in a Pod of a group, as KubeRay tells it."""
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    custom = {name: float(count) for name, count in group.get("resources", {}).items()}
    cpus = float(group["rayStartParams"].get("num-cpus", limits["cpu"]))
    return {"CPU": cpus, "GPU": float(limits.get("nvidia.com/gpu", 0)), **custom}


def asked(pool: PoolConfig) -> dict[str, float]:
    resources = pool.resources
    return {"CPU": resources.num_cpus, "GPU": resources.num_gpus, **resources.custom}


def holds(group: Group, demand: dict[str, float]) -> bool:
    has = ray_resources(group)
    return all(has.get(name, 0.0) >= amount for name, amount in demand.items())


@each_folder
def test_every_object_has_only_known_fields(folder: Path) -> None:
    for document in render(folder):
        jsonschema.validate(document, schema_of(document))


def test_a_misspelt_field_is_found() -> None:
    document = find(render(FOLDER / "base"), "RayService", "baton")
    spoilt = copy.deepcopy(document)
    spoilt["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["maxReplica"] = 3
    with pytest.raises(jsonschema.ValidationError, match="maxReplica"):
        jsonschema.validate(spoilt, schema_of(spoilt))


@each_folder
def test_the_configuration_is_one_of_batons(folder: Path, tmp_path: Path) -> None:
    assert build(configuration(folder, tmp_path))
    whole = ServeDeploySchema.model_validate(yaml.safe_load(service(folder)["serveConfigV2"]))
    assert (whole.http_options.host, whole.http_options.port) == ("0.0.0.0", 8000)  # where KubeRay and the probes look


@each_folder
def test_each_pool_has_its_own_group_with_room_for_an_update(folder: Path, tmp_path: Path) -> None:
    of_name = groups(service(folder))
    pools = configuration(folder, tmp_path).pools
    assert set(of_name) == {"ingress", *pools}
    for name, pool in pools.items():
        assert [group for group in of_name if holds(of_name[group], asked(pool))] == [name]
        assert ray_resources(of_name[name])["GPU"] == pool.resources.num_gpus  # one replica to a Pod
        assert of_name[name]["maxReplicas"] >= with_surge(bounds_of(pool)[1], pool.surge_percent)


@each_folder
def test_ingresses_and_the_manager_fit_into_their_group_alone(folder: Path, tmp_path: Path) -> None:
    of_name = groups(service(folder))
    ingress = configuration(folder, tmp_path).ingress
    assert [name for name in of_name if holds(of_name[name], {"CPU": 0.01})] == ["ingress"]
    assert ingress.replicas is not None  # null would go by the cores of the Pod that happens to build the application
    managers = 2 * 0.1
    each = int((ray_resources(of_name["ingress"])["CPU"] - managers) // ingress.num_cpus)
    assert each * of_name["ingress"]["maxReplicas"] >= ingress.replicas + 1
    assert service(folder)["rayClusterConfig"]["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"


@each_folder
def test_a_group_begins_within_its_bounds(folder: Path) -> None:
    spec = service(folder)
    incremental = spec["upgradeStrategy"]["type"] == "NewClusterWithIncrementalUpgrade"
    for name, group in groups(spec).items():
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
        if incremental and name != "ingress":
            assert group["replicas"] == 0  # else the new cluster begins as large as the old one
    assert spec["rayClusterConfig"]["enableInTreeAutoscaling"]


@each_folder
def test_the_file_of_api_keys_is_a_secret_that_ingresses_alone_have(folder: Path, tmp_path: Path) -> None:
    file = configuration(folder, tmp_path).ingress.keys_file
    cluster = service(folder)["rayClusterConfig"]
    mounted = {name: found for name, group in groups(service(folder)).items() if (found := of_secrets(group))}
    assert not of_secrets(cluster["headGroupSpec"])
    assert mounted == ({} if file is None else {"ingress": {file.parent: "baton-keys"}})


def test_one_overlay_asks_for_keys_and_the_guide_makes_the_secret(tmp_path: Path) -> None:
    files = {configuration(folder, tmp_path).ingress.keys_file for folder in EACH} - {None}
    (file,) = files
    assert file is not None
    guide = (FOLDER.parents[1] / "docs" / "guides" / "kubernetes.md").read_text()
    assert f"kubectl create secret generic baton-keys --from-file={file.name}" in guide


@each_folder
def test_requests_and_limits_of_memory_and_gpus_agree(folder: Path) -> None:
    for container in containers(service(folder)):
        requests, limits = container["resources"]["requests"], container["resources"]["limits"]
        for name in ("memory", "nvidia.com/gpu"):
            assert requests.get(name) == limits.get(name)
    assert len({container["image"] for container in containers(service(folder))}) == 1


@each_folder
def test_an_old_cluster_outlives_its_answers(folder: Path, tmp_path: Path) -> None:
    delay_s = service(folder)["rayClusterDeletionDelaySeconds"]
    assert delay_s >= configuration(folder, tmp_path).placement.session_timeout_s


@each_folder
def test_disruption_budgets_cover_every_pod_and_let_one_engine_go(folder: Path, tmp_path: Path) -> None:
    objects = render(folder)
    budgets = [each["spec"] for each in objects if each["kind"] == "PodDisruptionBudget"]
    cluster = service(folder)["rayClusterConfig"]
    for pod in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]:
        labels = pod["template"]["metadata"]["labels"].items()
        assert len([each for each in budgets if each["selector"]["matchLabels"].items() <= labels]) == 1
    least = sum(bounds_of(pool)[0] for pool in configuration(folder, tmp_path).pools.values())
    assert find(objects, "PodDisruptionBudget", "baton-engine")["spec"]["minAvailable"] == max(1, least - 1)


def test_the_probes_ask_routes_that_there_are() -> None:
    ingress = containers(service(FOLDER / "base"))[1]
    paths = {ingress[probe]["httpGet"]["path"] for probe in ("startupProbe", "readinessProbe")}
    assert paths == {"/ready", "/health"}
    routes = inspect.getsource(OwnRoutes.__init__)
    assert [path for path in paths if f'"{path}": self._' not in routes] == []


@each_folder
def test_ray_is_the_version_that_is_installed_from(folder: Path) -> None:
    version = service(folder)["rayClusterConfig"]["rayVersion"]
    assert f"ray[serve]=={version}" in (requires("baton") or [])


@each_folder
@pytest.mark.slow
def test_kubectl_makes_the_same_of_it(folder: Path) -> None:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is not installed")
    made = subprocess.run([kubectl, "kustomize", folder], capture_output=True, text=True, check=True, timeout=60)

    def by_name(documents: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
        return {(each["kind"], each["metadata"]["name"]): each for each in documents}

    assert by_name(list(yaml.safe_load_all(made.stdout))) == by_name(render(folder))
