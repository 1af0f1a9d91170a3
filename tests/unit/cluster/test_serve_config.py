"""The Serve config file that ships says the same as the code that it configures."""

from pathlib import Path

import yaml
from ray.serve.schema import ServeDeploySchema

import headrace_cluster
from headrace.config import settings_table
from headrace_cluster.serve_app import GRPC_SERVICER_FUNCTIONS, serve_app

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
