"""What the chart renders is valid for Helm, Kubernetes and KubeRay, and says what Headrace runs by."""

import copy
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import helm_python
import jsonschema
import kubernetes_validate
import pytest
import yaml
from helm_python import HelmError
from ray.serve.schema import ServeDeploySchema
from rendered_chart import (
    CALLERS_SHOW,
    CHART,
    EVERYTHING,
    EXTERNAL_REDIS,
    GOLDEN,
    LAPTOP,
    REDIS_BY_SECRETS,
    REDIS_CLUSTER,
    ROOT,
    SENTINEL,
    SIZES,
    TOGETHER,
    Manifest,
    Values,
    generator,
    loaded,
    merged,
    one,
    ray_pods,
    render,
    render_text,
    serve_config,
    size,
)

from headrace.config import settings_table
from headrace.core.limits import GRPC_MESSAGE_BYTES_MAX
from headrace.index.connection_factory import ClusterFactory, connection_factory
from headrace_cluster.proxy_http import CALLBACK, CALLBACK_VARIABLE, MESSAGE_BYTES_VARIABLE
from headrace_cluster.serve_app import GRPC_SERVICER_FUNCTIONS, WORKER_ENVIRONMENT, serve_app

# KubeRay's definitions lie beside a checkout of some, and are no part of this repository.
KUBERAY_CRDS = ROOT.parent / "shared" / "kuberay-crds"
# Kinds of which neither Kubernetes' schemas nor KubeRay's tell.
WITHOUT_SCHEMA = {"HTTPRoute", "GRPCRoute", "ServiceMonitor", "PodMonitor", "PrometheusRule"}

RENDERS: dict[str, Values] = {
    **{name: size(name) for name in SIZES},
    "everything": EVERYTHING,
    "everything-external": merged(EVERYTHING, EXTERNAL_REDIS),
    "everything-by-secrets": merged(EVERYTHING, REDIS_BY_SECRETS),
    "sentinel": SENTINEL,
    "cluster": REDIS_CLUSTER,
    "everything-callers-show": merged(EVERYTHING, CALLERS_SHOW),
    "everything-laptop": merged(EVERYTHING, LAPTOP),
    "everything-together": merged(EVERYTHING, TOGETHER),
}
each_render = pytest.mark.parametrize("name", RENDERS)


@cache
def rendered(name: str) -> list[Manifest]:
    return render(RENDERS[name])


@each_render
def test_helm_finds_nothing_to_complain_of(name: str):
    report = helm_python.lint(CHART, RENDERS[name], strict=True, kube_version="v1.33.0")
    assert report["errors"] == []
    assert [m["error"] for m in report["messages"] if m["severity"] > 1] == []


@each_render
def test_every_object_and_every_pod_is_valid_for_kubernetes(name: str):
    """Strict: fails for a misspelled field, too."""
    manifests = rendered(name)
    pods = [
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod", **pod["metadata"]}, "spec": pod["spec"]}
        for pod in ray_pods(manifests).values()
    ]
    plain = [m for m in manifests if m["kind"] not in WITHOUT_SCHEMA | {"RayService"}]
    assert len(plain) >= 4
    for manifest in plain + pods:
        kubernetes_validate.validate(manifest, "1.33", strict=True)


@each_render
def test_the_ray_service_is_valid_for_kuberay(name: str):
    """By the schemas of its definitions, with unknown fields refused."""
    if not KUBERAY_CRDS.is_dir():
        pytest.skip(
            f"KubeRay's definitions are not here ({KUBERAY_CRDS.name}): a RayService is not checked against them"
        )
    ray_service_validator().validate(one(rendered(name), "RayService"))


@cache
def ray_service_validator() -> Any:
    definition = yaml.load((KUBERAY_CRDS / "ray.io_rayservices.yaml").read_text("utf-8"), yaml.CSafeLoader)
    (schema,) = (v["schema"]["openAPIV3Schema"] for v in definition["spec"]["versions"] if v["name"] == "v1")
    return jsonschema.Draft7Validator(closed(schema))


def closed(schema: Any) -> Any:
    """The schema with every object closed that lists its properties; those of metadata are Kubernetes' own."""
    if isinstance(schema, list):
        return [closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {key: closed(value) for key, value in schema.items()}
    if isinstance(inner.get("properties"), dict) and "additionalProperties" not in inner and inner.get("type"):
        inner["additionalProperties"] = False
    return inner


@each_render
def test_serve_and_headrace_take_the_config_that_the_service_carries(name: str, monkeypatch: pytest.MonkeyPatch):
    """Fails for a setting that does not exist, an impossible one, or a key that is not Serve's."""
    config = serve_config(rendered(name))
    (app,) = ServeDeploySchema.model_validate(config).applications
    assert config["grpc_options"]["grpc_servicer_functions"] == GRPC_SERVICER_FUNCTIONS
    assert set(app.args) <= set(settings_table())
    pods = ray_pods(rendered(name))
    assert "redis_url" not in app.args
    variables = {v["name"]: v.get("value") for v in pods["head"]["spec"]["containers"][0]["env"]}
    url = variables["HEADRACE_REDIS_URL"] or "redis://from.a.secret:6379"
    monkeypatch.setenv("HEADRACE_REDIS_URL", url)
    # The files of TLS are there in pods only; `test_pods_certificates.py` makes them.
    without = [key for key in app.args if key.startswith("tls_")]
    secure = [app.args.pop(key) for key in without] != [] and not app.args.get("insecure_network")
    app.args["insecure_network"] = app.args.get("insecure_network", False) or secure
    settings = serve_app(app.args)._bound_deployment.init_args[0]
    assert settings["redis_url"] == url
    assert variables[CALLBACK_VARIABLE] == CALLBACK
    assert variables[MESSAGE_BYTES_VARIABLE] == str(GRPC_MESSAGE_BYTES_MAX)
    # A deployment's options in a config replace those of the code, so the pods bring what those had.
    assert WORKER_ENVIRONMENT.items() <= variables.items()


@each_render
def test_every_deployment_finds_pods_with_the_resource_it_asks_for(name: str):
    """Ray puts a worker where its resource is: fails when a kind of pods offers fewer than the settings ask for."""
    manifests = rendered(name)
    cluster = one(manifests, "RayService")["spec"]["rayClusterConfig"]
    offered = dict.fromkeys(("headrace_gateway", "headrace_prefill", "headrace_decode"), 0.0)
    for group in [{"maxReplicas": 1, **cluster["headGroupSpec"]}, *cluster.get("workerGroupSpecs", [])]:
        resources = json.loads(json.loads(group["rayStartParams"].get("resources", '"{}"')))
        for key, each in resources.items():
            offered[key] += each * group["maxReplicas"]
    settings = merged(size("values"), RENDERS[name])["settings"]
    config = serve_config(manifests)["applications"][0]
    deployments = {d["name"]: d for d in config["deployments"]}
    for deployment, key, setting in (
        ("Gateway", "headrace_gateway", "gateways"),
        ("PrefillWorker", "headrace_prefill", "prefill_workers"),
        ("DecodeWorker", "headrace_decode", "decode_workers"),
    ):
        number, most = settings[setting], settings.get(f"{setting}_max", 0)
        assert (deployment in deployments) == (number > 0)
        if number:
            assert deployments[deployment]["ray_actor_options"]["resources"] == {key: 1}
            assert offered[key] >= max(number, most)
            # Serve takes one of the two: a number that stays, or what the application says of its bounds.
            assert deployments[deployment].get("num_replicas") == (None if most > number else number)
            if most > number:
                assert (config["args"][setting], config["args"][f"{setting}_max"]) == (number, most)


def test_a_number_of_workers_that_stays_is_no_argument_so_that_another_one_replaces_nobody():
    """Serve replaces all replicas when an argument changes, and none for another `num_replicas`."""
    few, many = (
        serve_config(render({"settings": {"gateways": n, "prefill_workers": n, "decode_workers": 2 * n}}))
        for n in (2, 3)
    )
    first, second = few["applications"][0], many["applications"][0]
    assert first["args"] == second["args"]
    assert [d["num_replicas"] for d in first["deployments"]] == [2, 2, 4]
    assert [d["num_replicas"] for d in second["deployments"]] == [3, 3, 6]
    app = serve_app({**first["args"], "redis_url": "redis://127.0.0.1:1/0", "insecure_network": True})
    assert app._bound_deployment.num_replicas == 1
    # Without prefill workers decode workers compute prompts as well, which the application must know.
    assert serve_config(render({"settings": {"prefill_workers": 0}}))["applications"][0]["args"]["prefill_workers"] == 0


@pytest.mark.parametrize(
    ("gpus", "workers", "share"), [(0, 3, 0), (8, 8, 1), (4, 2, 2), (2, 5, 0.3333), (3, 4, 0.5), (1, 8, 0.125)]
)
def test_workers_that_share_the_gpus_of_a_pod_all_find_a_place(gpus: int, workers: int, share: float):
    """Ray puts a worker on one GPU: fails for two fifths each of two GPUs, on which a fifth worker finds no place."""
    config = serve_config(render({"decodePods": {"gpusPerPod": gpus, "perPod": workers}}))["applications"][0]
    (decode,) = (d for d in config["deployments"] if d["name"] == "DecodeWorker")
    assert decode["ray_actor_options"]["num_gpus"] == share
    assert share == 0 or share >= 1 or gpus * int(1 / share) >= workers


@each_render
def test_kuberay_finds_the_port_of_its_service_at_the_head(name: str):
    """KubeRay 1.5 takes no cluster into service whose head declares no port named `serve`, wherever gateways are."""
    head = ray_pods(rendered(name))["head"]["spec"]["containers"][0]
    assert {p["name"]: p["containerPort"] for p in head["ports"]}["serve"] == 8000


@each_render
def test_shared_memory_holds_the_arena_and_lies_within_the_memory_limit(name: str):
    manifests = rendered(name)
    arena_mb = serve_config(manifests)["applications"][0]["args"]["arena_mb"]
    for component, pod in ray_pods(manifests).items():
        (volume,) = (v for v in pod["spec"]["volumes"] if v["name"] == "shared-memory")
        assert volume["emptyDir"]["medium"] == "Memory"
        shared_mb = int(volume["emptyDir"]["sizeLimit"].removesuffix("Mi"))
        if component in ("prefill", "decode", "both") or len(ray_pods(manifests)) == 1:
            assert shared_mb > arena_mb
        limit = pod["spec"]["containers"][0]["resources"]["limits"]["memory"]
        assert shared_mb < float(limit.removesuffix("Gi")) * 1024


def test_memory_that_does_not_hold_the_arena_is_refused():
    with pytest.raises(HelmError, match="/dev/shm alone takes"):
        render({"settings": {"arena_mb": 9000}})


@each_render
def test_containers_may_do_nothing_that_they_do_not_need(name: str):
    manifests = rendered(name)
    pods = [*ray_pods(manifests).values()]
    pods += [m["spec"]["template"] for m in manifests if m["kind"] in ("StatefulSet", "Job")]
    autoscaling = one(manifests, "RayService")["spec"]["rayClusterConfig"].get("enableInTreeAutoscaling", False)
    for pod in pods:
        spec = pod["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] > 0
        is_autoscaler = autoscaling and pod["metadata"]["labels"]["app.kubernetes.io/component"] == "head"
        assert spec["automountServiceAccountToken"] is is_autoscaler
        for container in [*spec["containers"], *spec.get("initContainers", [])]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert {"cpu", "memory"} <= container["resources"]["requests"].keys()
            assert "memory" in container["resources"]["limits"]
    assert not {m["kind"] for m in manifests} & {"Role", "ClusterRole", "RoleBinding", "ClusterRoleBinding"}


@each_render
def test_an_autoscaler_may_write_where_the_head_may(name: str):
    """It runs beside it on a read-only root file system."""
    cluster = one(rendered(name), "RayService")["spec"]["rayClusterConfig"]
    if cluster.get("enableInTreeAutoscaling", False):
        mounted = [mount["mountPath"] for mount in cluster["autoscalerOptions"]["volumeMounts"]]
        assert mounted[:2] == ["/home/headrace", "/tmp"]


@each_render
def test_no_secret_is_in_plain_text(name: str):
    """Passwords, tokens and keys come from secrets that the chart does not make."""
    manifests = rendered(name)
    assert "Secret" not in {m["kind"] for m in manifests}
    pods = [*ray_pods(manifests).values()] + [
        m["spec"]["template"] for m in manifests if m["kind"] in ("StatefulSet", "Job")
    ]
    for variable in (v for pod in pods for c in pod["spec"]["containers"] for v in c.get("env", [])):
        if any(word in variable["name"] for word in ("PASSWORD", "TOKEN", "KEY", "AUTH")) and "value" in variable:
            # A switch and the path of a file.
            assert variable["name"] in ("TOKENIZERS_PARALLELISM", "RAY_TLS_SERVER_KEY")
        if "REDIS_URL" in variable["name"] and "value" in variable:
            passwords = re.findall(r":([^:/@]*)@|password=([^&]*)", variable["value"])
            assert {"".join(found) for found in passwords} <= {"", "$(HEADRACE_REDIS_PASSWORD)"}


def test_the_url_and_the_user_of_a_redis_can_come_from_secrets():
    """For the index and for Ray's own store; fails when either stands in the manifest instead."""
    pod = ray_pods(rendered("everything-by-secrets"))["decode"]
    sources = {
        v["name"]: v["valueFrom"]["secretKeyRef"] for v in pod["spec"]["containers"][0]["env"] if "valueFrom" in v
    }
    assert sources["HEADRACE_REDIS_URL"] == {"name": "redis-url", "key": "url"}
    assert sources["HEADRACE_REDIS_USERNAME"] == {"name": "redis-user", "key": "username"}
    store = one(rendered("everything-by-secrets"), "RayService")["spec"]["rayClusterConfig"]["gcsFaultToleranceOptions"]
    assert store["redisUsername"] == {"valueFrom": {"secretKeyRef": {"name": "redis-user", "key": "username"}}}


def test_ray_has_a_user_of_its_own_in_an_external_redis():
    """Headrace's ACL user reaches no key of Ray's: fails when the head is given that one, and ends."""
    for name in ("everything-external", "values-multinode"):
        store = one(rendered(name), "RayService")["spec"]["rayClusterConfig"]["gcsFaultToleranceOptions"]
        for field in ("username", "password"):
            source = {"secretKeyRef": {"name": "headrace-ray-redis", "key": field}}
            assert store[f"redis{field.capitalize()}"] == {"valueFrom": source}


def test_without_a_secret_url_the_user_of_a_secret_goes_into_the_url():
    values = {"redis": {**REDIS_BY_SECRETS["redis"], "external": {**REDIS_BY_SECRETS["redis"]["external"]}}}
    del values["redis"]["external"]["urlSecret"]
    (container,) = ray_pods(render(values))["decode"]["spec"]["containers"]
    (url,) = (v["value"] for v in container["env"] if v["name"] == "HEADRACE_REDIS_URL")
    assert url == "redis://$(HEADRACE_REDIS_USERNAME):$(HEADRACE_REDIS_PASSWORD)@redis.example:6379/0"
    names = [v["name"] for v in container["env"]]
    # Kubernetes puts in only what it has read before.
    assert names.index("HEADRACE_REDIS_USERNAME") < names.index("HEADRACE_REDIS_URL")
    assert names.index("HEADRACE_REDIS_PASSWORD") < names.index("HEADRACE_REDIS_URL")


def test_sentinels_are_named_in_the_url_and_let_through_with_the_servers_they_name():
    (container,) = ray_pods(rendered("sentinel"))["decode"]["spec"]["containers"]
    (url,) = (v["value"] for v in container["env"] if v["name"] == "HEADRACE_REDIS_URL")
    password = "$(HEADRACE_REDIS_PASSWORD)"
    assert url == f"redis+sentinel://:{password}@sentinel.example:26379/cache/0?sentinel_password={password}"
    factory = connection_factory(url.replace("$(HEADRACE_REDIS_PASSWORD)", "abc"), timeout_ms=250)
    assert (factory.service_name, factory.connection_kwargs["db"]) == ("cache", 0)
    (sentinel,) = factory.sentinel_manager.sentinels
    assert sentinel.connection_pool.connection_kwargs["password"] == "abc"
    (policy,) = (m for m in rendered("sentinel") if m["metadata"]["name"] == "demo-headrace-ray")
    assert [26379, 6379] in [[p["port"] for p in rule.get("ports", [])] for rule in policy["spec"]["egress"]]


def test_a_redis_cluster_is_named_in_the_url_as_the_index_reads_it():
    (container,) = ray_pods(rendered("cluster"))["decode"]["spec"]["containers"]
    (url,) = (v["value"] for v in container["env"] if v["name"] == "HEADRACE_REDIS_URL")
    assert url == "redis+cluster://:$(HEADRACE_REDIS_PASSWORD)@cluster.example:6379/0"
    factory = connection_factory(url.replace("$(HEADRACE_REDIS_PASSWORD)", "abc"), timeout_ms=250)
    assert isinstance(factory, ClusterFactory)
    assert factory.seeds == (("cluster.example", 6379),)
    assert factory.options["password"] == "abc"
    secure = render(merged(REDIS_CLUSTER, {"redis": {"external": {"tls": True}}}))
    (container,) = ray_pods(secure)["decode"]["spec"]["containers"]
    (url,) = (v["value"] for v in container["env"] if v["name"] == "HEADRACE_REDIS_URL")
    assert url.startswith("rediss+cluster://")


@each_render
def test_ray_asks_for_its_token(name: str):
    cluster = one(rendered(name), "RayService")["spec"]["rayClusterConfig"]
    assert cluster["authOptions"]["mode"] == "token"


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"imgae": {}}, "imgae"),
        ({"image": {"tga": "1"}}, "tga"),
        ({"settings": {"arena_gb": 1}}, "arena_gb"),
        ({"settings": {"redis_url": "redis://:password@host"}}, "redis_url"),
        ({"settings": {"arena_mb": "much"}}, "arena_mb"),
        ({"redis": {"mode": "embedded"}}, "mode"),
        ({"decodePods": {"perPod": 0}}, "perPod"),
        ({"tenants": {"secretName": "t"}}, "hash_algorithm"),
        ({"redis": {"mode": "external"}}, "external.host"),
        ({"redis": {"passwordSecret": {"name": ""}}}, "never open"),
        ({"monitoring": {"podMonitor": {"enabled": True}}}, "networkPolicies.prometheus"),
        ({"monitoring": {"serviceMonitor": {"enabled": True}}}, "networkPolicies.prometheus"),
        ({"monitoring": {"prometheusRule": {"enabled": True}}}, "serviceMonitor.enabled is needed"),
        ({"redis": {"bundled": {"maxMemoryMb": 1024}}}, "maxMemoryMb"),
        ({"httpRoute": {"enabled": True}}, "httpRoute.parentRefs"),
        ({"grpcRoute": {"enabled": True}}, "grpcRoute.parentRefs"),
        ({"ingress": {"enabled": True}}, "without keys"),
        ({"httpRoute": {"enabled": True, "parentRefs": [{"name": "outer"}]}}, "without keys"),
        ({"grpcRoute": {"enabled": True, "parentRefs": [{"name": "outer"}]}}, "without keys"),
        ({"service": {"type": "LoadBalancer"}}, "without keys"),
        (
            {"redis": {"mode": "external", "external": {"host": "h", "username": "u"}, "passwordSecret": {"name": ""}}},
            "passwordSecret",
        ),
        ({"networkPolicies": {"enabled": False}}, "tls.authoritySecret.name"),
        ({"networkPolicies": {"enabled": False}, "tls": {"authoritySecret": {"name": "a"}}}, "tenants.secretName"),
        ({"settings": {"insecure_network": True}}, "insecure_network"),
        (merged(SENTINEL, {"redis": {"external": {"sentinel": {"withPassword": False}}}}), "Ray sends the password"),
        ({"redis": {"external": {"username": "u", "usernameSecret": {"name": "s"}}}}, "two users"),
        (merged(REDIS_CLUSTER, {"ray": {"gcsFaultTolerance": True}}), "several shards"),
        (merged(REDIS_CLUSTER, {"redis": {"database": 1}}), "no other"),
        (merged(REDIS_CLUSTER, {"redis": {"external": {"sentinel": {"primary": "cache"}}}}), "two kinds of Redis"),
        ({"podDisruptionBudgets": {"maxUnavailable": "25%"}}, "maxUnavailable"),
    ],
)
def test_values_that_are_unknown_or_impossible_are_refused_by_name(values: Values, named: str):
    with pytest.raises(HelmError, match=named):
        loaded_and_checked(values)


@pytest.mark.parametrize("name", ["1chat", "team.chat"])
def test_a_release_whose_name_is_none_for_a_ray_service_is_refused(name: str):
    """Helm takes it: fails when KubeRay is left to say so, in an event that nobody reads."""
    with pytest.raises(HelmError, match="fullnameOverride is needed"):
        render({}, name)
    assert render({"fullnameOverride": "chat"}, name)


def loaded_and_checked(values: Values) -> None:
    loaded().validate_schema(loaded().merge_values(values))
    render_text(values)


def test_readme_and_schema_are_what_values_and_settings_give():
    for path, text in generator().generate_chart().items():
        assert path.read_text(encoding="utf-8") == text, f"run helm/generate_chart.py: {path.name}"


def test_the_schema_takes_every_setting_that_the_chart_does_not_set_itself():
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    assert set(schema["properties"]["settings"]["properties"]) | set(generator().CHART_SETTINGS) == set(
        settings_table()
    )


def test_every_value_has_a_comment():
    rows = list(generator().value_rows((CHART / "values.yaml").read_text(encoding="utf-8")))
    assert len(rows) > 80
    assert [row.path for row in rows if not row.comment] == []


@pytest.mark.parametrize("name", ["values", "values-minimal"])
def test_the_render_is_the_golden_one(name: str):
    """After a change on purpose: `python helm/generate_chart.py --golden`, and read what it changed."""
    assert (GOLDEN / f"{name}.yaml").read_text(encoding="utf-8") == generator().render_golden(name)


def changed(value: Any) -> list[Any]:
    """Other values of the same type."""
    if isinstance(value, bool):
        return [not value, value]
    if isinstance(value, int | float):
        return [value + 1, 2 * value]
    if isinstance(value, str):
        return [f"{value}x", "1Gi"]
    if isinstance(value, list):
        return [[*value, "other"], [{"key": "other"}]]
    return [{"other": "changed"}, {"limits": {"cpu": "3"}}]


def value_paths() -> list[tuple[str, Any]]:
    rows = list(generator().value_rows((CHART / "values.yaml").read_text(encoding="utf-8")))
    named = {row.path for row in rows}
    others = [
        (f"settings.{key}", row.default)
        for key, (_, row) in settings_table().items()
        if key not in generator().CHART_SETTINGS and f"settings.{key}" not in named
    ]
    return [(row.path, row.default) for row in rows] + others


@pytest.mark.parametrize(("path", "default"), value_paths(), ids=[path for path, _ in value_paths()])
def test_every_value_changes_the_render(path: str, default: Any):
    """Fails for a value that no template reads. Some are read only where another is set, so several bases are tried."""
    candidates = generator().CHOICES.get(path) or changed(default)
    for base in (
        {},
        EVERYTHING,
        merged(EVERYTHING, EXTERNAL_REDIS),
        merged(EVERYTHING, TOGETHER),
        merged(EVERYTHING, REDIS_BY_SECRETS),
        SENTINEL,
        REDIS_CLUSTER,
        merged(EVERYTHING, CALLERS_SHOW),
        merged(SENTINEL, {"ray": {"gcsFaultTolerance": False}}),
        {"networkPolicies": {"prometheus": [{"podSelector": {}}]}},
    ):
        before = base_text(json.dumps(base))
        for candidate in candidates:
            override: Any = candidate
            for step in reversed(path.split(".")):
                override = {step: override}
            try:
                if render_text(merged(base, override)) != before:
                    return
            except HelmError:
                continue
    pytest.fail(f"{path} changes nothing")


@cache
def base_text(base: str) -> dict[str, str]:
    return render_text(json.loads(base))


# What Kubernetes or KubeRay lets nobody change of an object that exists.
IMMUTABLE = {
    "StatefulSet": ("serviceName", "selector", "podManagementPolicy", "volumeClaimTemplates"),
    "Deployment": ("selector",),
    "Service": ("clusterIP",),
    "Job": ("selector", "template", "completions"),
    "PersistentVolumeClaim": ("accessModes", "storageClassName", "volumeName"),
    "RayService": ("rayClusterConfig.gcsFaultToleranceOptions.backend",),
}


def immutable_fields(manifests: list[Manifest]) -> dict[str, str]:
    """Kind, name and field -> value, as JSON; `null` for one that is not set. A hook is made anew each time.

    What KubeRay lets nobody change may be set or taken away: by such rules Kubernetes compares what is there before
    and after.
    """
    fields = {}
    for manifest in manifests:
        if "helm.sh/hook" in manifest["metadata"].get("annotations", {}):
            assert "before-hook-creation" in manifest["metadata"]["annotations"]["helm.sh/hook-delete-policy"]
            continue
        for path in IMMUTABLE.get(manifest["kind"], ()):
            value: Any = manifest["spec"]
            for step in path.split("."):
                value = (value or {}).get(step)
            if value is None and manifest["kind"] == "RayService":
                continue
            fields[f"{manifest['kind']}/{manifest['metadata']['name']}: {path}"] = json.dumps(value, sort_keys=True)
    return fields


@pytest.mark.parametrize("name", ["values", "values-minimal"])
@pytest.mark.parametrize("release", sorted(path.name for path in (GOLDEN / "releases").iterdir()))
def test_an_upgrade_from_an_earlier_release_changes_no_immutable_field(release: str, name: str):
    """`releases/` keeps the render of each released chart; what is in both must agree."""
    text = (GOLDEN / "releases" / release / f"{name}.yaml").read_text(encoding="utf-8")
    before = immutable_fields([m for m in yaml.load_all(text, yaml.CSafeLoader) if m])
    after = immutable_fields(rendered(name))
    assert before
    assert {key: after.get(key, value) for key, value in before.items()} == before


def test_a_release_is_kept_by_one_command_and_only_once(tmp_path: Path):
    """Fails when what was released can be written over: then an upgrade from it is compared with something else."""
    version = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))["version"]
    folder = generator().keep_release(tmp_path)
    assert folder == tmp_path / version
    for name in ("values", "values-minimal"):
        assert (folder / f"{name}.yaml").read_text(encoding="utf-8") == generator().render_golden(name)
    with pytest.raises(FileExistsError):
        generator().keep_release(tmp_path)


def test_a_changed_immutable_field_is_noticed():
    """The check above, on a render in which one was changed."""
    manifests = copy.deepcopy(rendered("values"))
    one(manifests, "StatefulSet")["spec"]["serviceName"] = "other"
    assert immutable_fields(manifests) != immutable_fields(rendered("values"))


def test_the_charts_version_is_that_of_the_package():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    assert f'version = "{chart["appVersion"]}"' in Path(ROOT / "pyproject.toml").read_text(encoding="utf-8")
