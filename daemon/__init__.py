"""The service that runs once per node: app, config, journal, control, bulk, status and command line."""
