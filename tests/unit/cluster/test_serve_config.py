"""The Serve config file that ships says the same as the code that it configures."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

import headrace_cluster
from headrace.config import config_to_flat, load_config, settings_table
from headrace.core.errors import ConfigInvalid
from headrace_cluster.gateway_replica import GatewayReplica
from headrace_cluster.serve_app import GRPC_SERVICER_FUNCTIONS, REPLICA_GRACE_S, check_ray, gpu_share, serve_app
from headrace_cluster.store_actor import differing, start_timeout_s, tell_differences

CONFIG = yaml.safe_load((Path(headrace_cluster.__file__).parent / "serve_config.yaml").read_text(encoding="utf-8"))


def test_the_file_is_valid_for_serve_and_names_only_settings_that_exist():
    """Fails for a misspelled key of Serve's (it forbids unknown ones) or of ours."""
    (app,) = ServeDeploySchema.model_validate(CONFIG).applications
    assert app.import_path == "headrace_cluster.serve_app:serve_app"
    assert set(app.args) <= set(settings_table())


def test_the_proxies_get_the_same_grpc_services_as_under_headrace_up():
    assert CONFIG["grpc_options"]["grpc_servicer_functions"] == GRPC_SERVICER_FUNCTIONS


def test_the_application_can_be_built_from_the_files_arguments():
    """Fails when the arguments are refused, a deployment's options are not Serve's, or `serve deploy` with other
    arguments cuts streams off that would have ended by themselves."""
    app = serve_app(CONFIG["applications"][0]["args"])
    gateway = app._bound_deployment
    workers = [bound._bound_deployment for bound in gateway.init_args[1:]]
    assert [each.name for each in (gateway, *workers)] == ["Gateway", "DecodeWorker", "PrefillWorker"]
    for each in (gateway, *workers):
        assert each._deployment_config.graceful_shutdown_timeout_s == REPLICA_GRACE_S


def test_workers_find_a_place_on_the_gpus_whatever_their_numbers():
    """Fails when shares are equal and do not fit: two GPUs have room for four workers with 0.4 of one, not for five."""
    assert gpu_share(0, 3) == 0
    assert gpu_share(8, 8) == gpu_share(8, 1) == 1
    assert gpu_share(2, 5) == pytest.approx(1 / 3, abs=0.001)
    for gpus in range(1, 9):
        for workers in range(1, 65):
            share = gpu_share(gpus, workers)
            assert share > 0
            assert gpus * int(1 / share) >= workers


def test_a_store_node_with_a_large_arena_has_the_time_to_check_what_it_holds():
    """Fails when the workers of a host with 512 GB of blocks do not start after its store node died."""
    assert start_timeout_s(load_config({"arena_mb": 512 * 1024}, environ={})) > 512 * 2 / 2 + 30
    assert start_timeout_s(load_config({}, environ={})) < 90


def test_settings_that_a_store_node_which_is_there_does_not_take_over_are_named():
    """Fails when `arena_mb` is raised, or a second application's worker comes to the host, and nobody is told that the
    store node goes on as it was."""
    had = config_to_flat(load_config({"arena_mb": 64, "redis_url": "redis://a"}, environ={}))
    wanted = config_to_flat(load_config({"arena_mb": 65, "redis_url": "redis://b", "gateways": 2}, environ={}))
    assert sorted(differing(had, wanted)) == ["arena_mb", "redis_url"]
    assert differing(had, had) == []


async def test_a_worker_starts_beside_a_store_node_of_an_earlier_version_and_says_that_it_cannot_be_asked(caplog):
    """Fails when no worker starts after an upgrade that left store nodes running, or their settings go unsaid."""
    of_an_earlier_version = SimpleNamespace()  # as a handle of Ray's: a method that it does not know is no attribute
    await tell_differences(of_an_earlier_version, config_to_flat(load_config({}, environ={})))
    assert "earlier version" in caplog.text


async def test_a_gateway_that_follows_nobody_any_more_is_replaced():
    """Fails when Serve is told that a gateway is healthy whose picture of the workers will never change again."""

    class Followed:
        answer = True

        def healthy(self) -> bool:
            return self.answer

    replica = SimpleNamespace(_gateway=Followed())  # a whole one needs Serve
    await GatewayReplica.check_health(replica)
    replica._gateway.answer = False
    with pytest.raises(RuntimeError, match="follows"):
        await GatewayReplica.check_health(replica)


@pytest.mark.parametrize("ray_use_tls", [{}, {"RAY_USE_TLS": "0"}, {"RAY_USE_TLS": ""}])
def test_tls_between_parts_is_refused_beside_a_ray_in_plain_text(ray_use_tls: dict[str, str]):
    """Prompts go from gateways to workers by Ray. Fails when that is in the clear and nobody says so."""
    secure = {"tls_ca_file": "ca.pem", "store_host": "10.0.0.5"}
    with pytest.raises(ConfigInvalid, match=r"tls_ca_file.*RAY_USE_TLS=1.*insecure_network"):
        check_ray(load_config(secure, environ={}), ray_use_tls)
    check_ray(load_config(secure, environ={}), {"RAY_USE_TLS": "1"})
    check_ray(load_config(secure | {"insecure_network": True}, environ={}), ray_use_tls)
    check_ray(load_config(secure | {"store_host": "127.0.0.1"}, environ={}), ray_use_tls)
    check_ray(load_config({"store_host": "10.0.0.5"}, environ={}), ray_use_tls)
