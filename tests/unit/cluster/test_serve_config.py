"""The Serve config file that ships says the same as the code that it configures."""

from pathlib import Path

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

import headrace_cluster
from headrace.config import load_config, settings_table
from headrace.core.errors import ConfigInvalid
from headrace_cluster.serve_app import GRPC_SERVICER_FUNCTIONS, check_ray, serve_app

CONFIG = yaml.safe_load((Path(headrace_cluster.__file__).parent / "serve_config.yaml").read_text(encoding="utf-8"))


def test_the_file_is_valid_for_serve_and_names_only_settings_that_exist():
    """Fails for a misspelled key of Serve's (it forbids unknown ones) or of ours."""
    (app,) = ServeDeploySchema.model_validate(CONFIG).applications
    assert app.import_path == "headrace_cluster.serve_app:serve_app"
    assert set(app.args) <= set(settings_table())


def test_the_proxies_get_the_same_grpc_services_as_under_headrace_up():
    assert CONFIG["grpc_options"]["grpc_servicer_functions"] == GRPC_SERVICER_FUNCTIONS


def test_the_application_can_be_built_from_the_files_arguments():
    """Fails when the arguments are refused, or a deployment's options are not Serve's."""
    serve_app(CONFIG["applications"][0]["args"])


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
